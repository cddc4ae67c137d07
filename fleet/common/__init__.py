"""Helpers that any folder of the library may import; nothing here is public, and nothing here knows the rest of it."""
