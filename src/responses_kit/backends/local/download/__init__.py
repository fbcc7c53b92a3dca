"""Downloads of model files."""
