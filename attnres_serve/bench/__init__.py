"""``attnres-serve bench``: what AttnRes costs against the same model with standard residuals."""
