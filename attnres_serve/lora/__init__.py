"""LoRA adapters: the files of one, what is refused of it, and those that flags name."""
