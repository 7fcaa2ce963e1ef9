"""LoRA adapters: checks of their files, refusals, and the adapters of flags."""
