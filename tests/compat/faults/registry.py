"""The parser of config.json, and lists of architectures."""

CANNOT = "nothing is wrong: vLLM does not know our architectures."
