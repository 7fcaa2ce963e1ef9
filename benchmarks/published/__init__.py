"""Tables and figures of the documentation."""
