"""GGUF files: headers, checks that the engine supports a file, and conversion for the engine."""
