"""The conversion of requests, replies and WebSockets between Django and the kit."""
