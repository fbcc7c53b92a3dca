"""Grammars that restrict a model to the outputs that a turn allows."""
