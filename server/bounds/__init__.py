"""Bounds of a request, and the API key."""
