"""Settings with which some of vLLM's layers do more to the residual than a depth state allows, or
that vLLM itself ends by an assertion for.

A layer is named by the module of vLLM that defines it, for example
``vllm.model_executor.models.deepseek_v2``.
"""

from types import SimpleNamespace

from attnres_serve.compat import host
from attnres_serve.errors import SettingError

# Parts of module names.  A test compares them with the installed vLLM.
SCALES_RESIDUAL_IN_FLOAT16 = ("deepseek_v2", "AXK1", "openpangu")
# Compiled models with vLLM's own layer of Kimi Delta Attention on other devices than a CPU.
ALICE_AI, KDA = "attnres_serve.model.alice_ai", "attnres_serve.model.kda"
OWN_MODULES = ("kimi", "alice_ai")  # whose layers are of vLLM's
SPLITS_RESIDUAL = ("deepseek_v2", "qwen3_next", "qwen3_5", *OWN_MODULES)
DELTA_NETS = ("gated_deltanet", "kda")  # of FLA's, whose decoder is ours
HAS_STATES = (*OWN_MODULES, *DELTA_NETS, "qwen3_next", "bailing_moe_linear")
LINEAR_SINCE = (0, 32)
ASKS_FOR_BOTH_KINDS = ("qwen3_next", "alice_ai")  # of every stage, with caches of two kinds
MISCOUNTS_DECAY = ("bailing_moe_linear",)  # docs/build/upstream/lightning-prefill.md
FUSES_ALL_REDUCE = ("deepseek_v32", "glm5next", "minimax_m3", "step3p5")


def require_whole_residual(vllm_config, module: str) -> None:
    """Refuse the settings that a base family's layers cannot have with AttnRes.

    Args:
        vllm_config: vLLM's, complete but for its workers.
        module: name of the module that defines the family's layers.

    Raises:
        SettingError: the first such setting, in one sentence.
    """
    for problem in (
        float16_problem,
        sequence_parallel_problem,
        fused_all_reduce_problem,
        lightning_problem,
        stages_problem,
        version_problem,
        speculation_problem,
        tracing_problem,
        convolution_problem,
        heads_problem,
    ):
        found = problem(vllm_config, module)
        if found is not None:
            raise SettingError(found)


def float16_problem(vllm_config, module: str) -> str | None:
    """DeepSeek's first layer divides the residual by the routed scaling factor in float16."""
    import torch

    dtype = vllm_config.model_config.dtype
    if dtype != torch.float16 or not is_one_of(module, SCALES_RESIDUAL_IN_FLOAT16):
        return None
    return (
        "--dtype is float16, in which vLLM's layers of this family scale the residual, and AttnRes "
        "has none to scale; choose bfloat16 or float32."
    )


def sequence_parallel_problem(vllm_config, module: str) -> str | None:
    """Tensor, data and expert parallelism together split the tokens of a residual over workers."""
    splits = vllm_config.parallel_config.use_sequence_parallel_moe
    if not splits or not is_one_of(module, SPLITS_RESIDUAL):
        return None
    return (
        "expert parallelism with tensor and data parallelism splits the residual of this family's "
        "layers over workers, which AttnRes does not support; leave one of the three out."
    )


def fused_all_reduce_problem(vllm_config, module: str) -> str | None:
    """Some layers add and norm within their all-reduce and go around the norm that is a site."""
    workers = vllm_config.parallel_config.tensor_parallel_size
    if workers == 1 or not is_one_of(module, FUSES_ALL_REDUCE):
        return None
    return (
        f"--tensor-parallel-size is {workers}, with which vLLM's layers of this family norm within "
        "their all-reduce and leave out the sites of AttnRes; serve it on one worker."
    )


def lightning_problem(vllm_config, module: str) -> str | None:
    """The kernel of lightning attention for GPUs; on a CPU it is ours."""
    if host.on_cpu() or not is_one_of(module, MISCOUNTS_DECAY):
        return None
    return (
        "vLLM's kernel of lightning attention computes prompts of more than 256 tokens, and those "
        "in chunks, by another function than their continuation; serve this family on a CPU."
    )


def stages_problem(vllm_config, module: str) -> str | None:
    """Workers agree on one layout of caches and on groups of them, on CPU by the layers they have.

    Linear layers alone have another layout, and none of them no group to copy states in.
    """
    from vllm.distributed.utils import get_pp_indices

    if not is_one_of(module, ASKS_FOR_BOTH_KINDS) or not host.on_cpu():
        return None
    kinds = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    stages = vllm_config.parallel_config.pipeline_parallel_size
    for stage in range(stages):
        begin, end = get_pp_indices(len(kinds), stage, stages)
        if {*kinds[begin:end]} != {*kinds}:
            return (
                f"the pipeline stage of the layers {begin} to {end - 1} has one kind of layer, "
                "which vLLM cannot run beside other stages on CPU; set VLLM_PP_LAYER_PARTITION so "
                f"that each has layers of {' and '.join(sorted({*kinds}))}."
            )
    return None


def version_problem(vllm_config, module: str) -> str | None:
    """What a batch says of new sequences was read, and run, from this version on."""
    if not is_one_of(module, HAS_STATES) or not host.is_older_than(LINEAR_SINCE):
        return None
    since = ".".join(map(str, LINEAR_SINCE))
    return f"models with linear attention need vLLM {since} or later; install it, or a later one."


def speculation_problem(vllm_config, module: str) -> str | None:
    """Our layers of linear attention have one state, that of the newest token."""
    if not is_one_of(module, HAS_STATES) or not host.on_cpu():
        return None
    if not (drafts := vllm_config.num_speculative_tokens):
        return None
    return (
        f"speculative decoding with {drafts} tokens is not supported on CPU for models with linear "
        "attention, whose state cannot go back; start without --speculative-config."
    )


def tracing_problem(vllm_config, module: str) -> str | None:
    """vLLM's own layer of Kimi Delta Attention looks at the batch, which a compiler would fix."""
    if module not in (ALICE_AI, KDA) or host.on_cpu():
        return None
    if vllm_config.model_config.enforce_eager:
        return None
    return (
        "this family cannot be compiled on this device, as vLLM's layer of Kimi Delta Attention is "
        "no operator of torch's; add --enforce-eager."
    )


# What Hugging Face's classes call the width of a short convolution, in tokens.
CONVOLUTIONS = ("linear_conv_kernel_dim", "short_conv_kernel_size", "conv_kernel", "conv_L_cache")
WIDEST = 4


def convolution_problem(vllm_config, module: str) -> str | None:
    """vLLM's kernel of a prompt's convolution, for GPUs, has branches for 2, 3 and 4 tokens.

    For more of them it takes one value for all, and says nothing (``causal_conv1d.py``, 0.32).
    """
    if host.on_cpu():
        return None
    config = vllm_config.model_config.hf_text_config
    for place in (config, SimpleNamespace(**(getattr(config, "linear_attn_config", None) or {}))):
        for key in CONVOLUTIONS:
            width = getattr(place, key, 0)
            if width > WIDEST:
                return (
                    f"{key} is {width}, and vLLM's kernel for GPUs computes convolutions of up to "
                    f"{WIDEST} tokens; serve this model on a CPU."
                )
    return None


def heads_problem(vllm_config, module: str) -> str | None:
    """A worker has whole heads of a recurrence; vLLM looks at those of attention only."""
    if not is_one_of(module, HAS_STATES):
        return None
    workers = vllm_config.parallel_config.tensor_parallel_size
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = getattr(vllm_config.model_config.hf_text_config, key, 0)
        if heads % workers:
            return (
                f"--tensor-parallel-size is {workers}, which does not divide {key}, {heads}; "
                "choose one that does."
            )
    return None


def is_one_of(module: str, parts: tuple[str, ...]) -> bool:
    """Whether a module's name has one of these parts."""
    return not set(module.split(".")).isdisjoint(parts)
