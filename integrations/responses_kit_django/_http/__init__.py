"""Requests, replies and WebSockets between Django and the kit."""
