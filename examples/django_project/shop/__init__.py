"""The project: a shop that has been there before."""
