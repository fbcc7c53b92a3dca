"""Orders, and the assistant who knows where they are."""
