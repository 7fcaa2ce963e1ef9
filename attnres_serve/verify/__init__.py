"""``attnres-serve verify`` and the independent model that it compares with."""
