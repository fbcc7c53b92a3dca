"""From a request to the turn that a backend is given."""
