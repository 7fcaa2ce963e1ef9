"""``attnres-serve verify``, and its independent float64 models."""
