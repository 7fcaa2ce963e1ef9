"""The parser of config.json, and lists of architectures."""

CANNOT = "nothing is wrong: vLLM hands no additional_config to a parser, and does not know our architectures."
