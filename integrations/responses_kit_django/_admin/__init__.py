"""The queries and the rendering of the admin pages."""
