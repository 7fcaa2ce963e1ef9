"""The configuration that open-attnres and delta-attnres share: ``attnres_mode`` and related keys.

Both call their Qwen3 model ``qwen3_attnres``.  Only a checkpoint's tensors show which of the two it
is; see ``resolve``.
"""

from typing import Any

from attnres_serve.depth.spec import AttnResSpec, is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats.family_config import family_config, refuse_windows
from attnres_serve.formats.format import Blocks
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.refused import variant

ARCHITECTURES = {
    "qwen3_attnres": ("qwen3", "Qwen3AttnResForCausalLM"),
    "llama_attnres": ("llama", "LlamaAttnResForCausalLM"),
}
BLOCKS = Blocks("attnres_num_blocks", "blocks")
KEYS = (
    "attnres_mode",
    "attnres_num_blocks",
    "attnres_gate_type",
    "attnres_use_null_source",
    "attnres_recency_bias_init",
    "attnres_num_heads",  # of the unsupported multi-head modes; written in every mode
    "attnres_init_bias",  # these two are from older versions, and no code reads them
    "attnres_gate_init",
)
# Names that differ from the house format.
QUERIES = ("model.layers.#.attn_res_", "model.layers.#.self_attention_res_")


def matches(config: dict[str, Any], model_types: tuple[str, ...]) -> bool:
    model_type = config.get("model_type")
    return model_type in model_types and config.get("architectures") == [
        ARCHITECTURES[model_type][1]
    ]


def translate(config: dict[str, Any], name: str, **options: Any) -> ParsedConfig:
    """Translate for the format ``name``, whose specification has the further ``options``.

    A block has ceil(L / attnres_num_blocks) layers; in the mode ``full`` every sublayer is one.

    Raises:
        CheckpointError: names another mode, a gate or a null source.
    """
    mode, gate = config.get("attnres_mode"), config.get("attnres_gate_type", "bias")
    if mode not in ("block", "full"):
        raise CheckpointError(
            f"attnres_mode is {mode!r}{variant(str(mode))}, another function than Block or Full "
            "AttnRes, and is not supported; supported are 'block' and 'full'."
        )
    if gate != "bias":
        raise CheckpointError(
            f"attnres_gate_type is {gate!r}: a gate between the mix and the residual stream is not "
            "supported; supported is 'bias', which has none."
        )
    if null_source := config.get("attnres_use_null_source"):
        raise CheckpointError(
            f"attnres_use_null_source is {null_source!r}: a null source, which is no sublayer's "
            "output, is not supported; supported is false."
        )
    family, _ = ARCHITECTURES[config["model_type"]]
    translated = family_config(config, family, KEYS)
    refuse_windows(config)
    blocks: Any = config.get("attnres_num_blocks")
    if mode == "block" and not is_count(blocks):
        raise CheckpointError(
            f"attnres_num_blocks is {blocks!r}; expected a whole number of blocks, at least 1."
        )
    layout, eps = FAMILIES[family].layout(config), config.get("rms_norm_eps", 1e-6)
    if mode == "full":
        spec = AttnResSpec.uniform(layout, 1, eps, **options)
    else:
        spec = AttnResSpec.by_layers(layout, -(-layout.num_layers // blocks), eps, **options)
    return ParsedConfig(name, family, translated, spec)
