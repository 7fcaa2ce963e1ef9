"""Sites of a whole model without vLLM."""
