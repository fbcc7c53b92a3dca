"""The project: an existing shop."""
