"""Parsing of the reasoning and the tool calls that a model writes as text.

A backend for a model without an API for tools can use `parser.Parser` to convert the model's text to outputs.
"""
