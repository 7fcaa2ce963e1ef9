"""``attnres-serve convert``: a checkpoint that computes what another one computes."""
