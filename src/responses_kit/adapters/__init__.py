"""Code shared by ASGI and by WSGI hosts, without a web framework."""
