"""Management commands, one in each module."""
