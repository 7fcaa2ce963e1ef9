"""The start of a server: its console output, and its signals."""
