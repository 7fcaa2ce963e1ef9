"""``attnres-serve inspect``: what the sites of a prompt attend to, as a figure."""
