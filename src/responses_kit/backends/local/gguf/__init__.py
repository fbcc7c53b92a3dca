"""GGUF files: headers, conversion for the engine, and checks that the engine supports a file."""
