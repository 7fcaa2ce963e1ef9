"""The only room that subclasses vLLM: sites, their state, and models that have them."""
