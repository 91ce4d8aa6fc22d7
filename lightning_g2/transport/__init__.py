"""Placeholder docstring to be replaced by the room."""
