"""Names of tensors by format."""

HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "attention": "model.layers.{}.self_attn.",
    "mlp": "model.layers.{}.mlp.",
}


def depth_names(*kinds: str) -> dict[str, str]:
    """The house format's names of what sites have, for sublayers of these kinds."""
    stems = {kind: f"model.layers.{{}}.{_STEMS.get(kind, kind)}_res" for kind in kinds}
    stems["final"] = "model.output_attn_res"
    leaves = {"query": "_proj.weight", "key": "_norm.weight", "recency": "_bias"}
    return {
        f"{kind}_{part}": stem + leaf
        for kind, stem in stems.items()
        for part, leaf in leaves.items()
    }


_STEMS = {"attention": "self_attention"}

HOUSE_NAMES = HF_NAMES | depth_names("attention", "mlp")

OPEN_NAMES = HF_NAMES | {
    "attention_query": "model.layers.{}.attn_res_proj.weight",
    "attention_key": "model.layers.{}.attn_res_norm.weight",
    "attention_recency": "model.layers.{}.attn_res_bias",
    "mlp_query": "model.layers.{}.mlp_res_proj.weight",
    "mlp_key": "model.layers.{}.mlp_res_norm.weight",
    "mlp_recency": "model.layers.{}.mlp_res_bias",
}

DELTA_NAMES = OPEN_NAMES | {
    "final_query": "model.final_res_proj.weight",
    "final_key": "model.final_res_norm.weight",
}

TITAN_NAMES = OPEN_NAMES | {
    "final_query": "model.final_attn_res_proj.weight",
    "final_key": "model.final_attn_res_norm.weight",
}

BASELINE_NAMES = HF_NAMES | {
    f"{role}_{part}": f"model.{stem}_aggregator.{leaf}"
    for role, stem in (
        ("attention", "layers.{}.attnres_attn"),
        ("mlp", "layers.{}.attnres_mlp"),
        ("final", "attnres_final"),
    )
    for part, leaf in (
        ("query", "pseudo_query"),
        ("key", "norm.weight"),
        ("recency", "recency_bias"),
    )
}

FLA_NAMES = {
    "embedding": "model.embeddings.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "model.layers.{}.attn_norm.weight",
    "mlp_norm": "model.layers.{}.mlp_norm.weight",
    "attention": "model.layers.{}.attn.",
    "mlp": "model.layers.{}.mlp.",
    "attention_query": "model.layers.{}.attn_res_proj.weight",
    "attention_key": "model.layers.{}.attn_res_norm.weight",
    "mlp_query": "model.layers.{}.mlp_res_proj.weight",
    "mlp_key": "model.layers.{}.mlp_res_norm.weight",
    "final_query": "model.res_proj.weight",
    "final_key": "model.res_norm.weight",
}

NANOGPT_NAMES = {
    "embedding": "transformer.wte.weight",
    "final_norm": "transformer.ln_f.weight",
    "head": "lm_head.weight",
    "attention_norm": "transformer.h.{}.ln_1.weight",
    "mlp_norm": "transformer.h.{}.ln_2.weight",
    "attention": "transformer.h.{}.attn.",
    "mlp": "transformer.h.{}.mlp.",
    "attention_query": "transformer.h.{}.attn_res_q1",
    "attention_key": "transformer.h.{}.attn_res_norm1.weight",
    "mlp_query": "transformer.h.{}.attn_res_q2",
    "mlp_key": "transformer.h.{}.attn_res_norm2.weight",
    "final_query": "attn_res_qf",
    "final_key": "attn_res_normf.weight",
}

NANOGPT_LEAVES = {
    "o_proj": "c_proj",
    "gate_proj": "c_gate",
    "up_proj": "c_val",
    "down_proj": "c_proj",
}
