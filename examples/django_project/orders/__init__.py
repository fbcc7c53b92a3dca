"""Orders, and an assistant that answers questions about them."""
