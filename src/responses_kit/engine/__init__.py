"""The life of one response."""
