"""``attnres-serve bench``: the cost of AttnRes against the same model with standard residuals."""
