"""Backends that come with the kit, one module each."""
