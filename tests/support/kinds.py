"""A family of each kind, for what one of them shows of all."""

# Dense, a mixture of experts, latent attention, norms of weight 1 + w, one sublayer a layer,
# linear attention beside latent.
KINDS = ("llama", "qwen3_moe", "deepseek_v3", "gemma2", "mamba2", "kimi_linear")
