"""The routes of attnres-serve."""
