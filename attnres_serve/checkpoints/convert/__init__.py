"""``attnres-serve convert``: a checkpoint that computes the same as another one."""
