"""Resolution of a request into the turn that a backend answers."""
