"""The wire protocols over HTTP and WebSocket, without a web framework."""
