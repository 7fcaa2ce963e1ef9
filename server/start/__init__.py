"""The start of a server as a person and a signal meet it."""
