"""Parsing of reasoning and tool calls that a model writes as text."""
