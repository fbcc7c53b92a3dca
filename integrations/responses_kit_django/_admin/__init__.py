"""The queries and texts behind the admin pages."""
