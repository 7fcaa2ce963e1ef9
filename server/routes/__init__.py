"""The routes that are ours."""
