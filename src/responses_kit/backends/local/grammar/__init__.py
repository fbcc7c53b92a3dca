"""Grammars that constrain the sampled tokens to what a turn allows."""
