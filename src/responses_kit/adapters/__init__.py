"""What ASGI and WSGI hosts share, without a web framework."""
