"""Prompts: variants of conversations, chat templates and their sandbox."""
