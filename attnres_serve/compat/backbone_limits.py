"""Settings with which some of vLLM's layers do more to the residual than a depth state allows, or
that vLLM itself ends by an assertion for.

A family's file states its limits. Here each of them refuses the settings that it rules out.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace

from attnres_serve.compat import device, versions
from attnres_serve.errors import SettingError
from attnres_serve.families import footprint
from attnres_serve.families.family import Family, Shape
from attnres_serve.families.limits import Limit

LINEAR_SINCE = (0, 32)
WITHOUT_DRAFTS = (0, 30)  # on a CPU
Shapes = Mapping[str, Shape]


def require_whole_residual(vllm_config, family: Family, shapes: Shapes) -> None:
    """Refuse the settings that a base family's layers cannot have with AttnRes.

    Args:
        vllm_config: vLLM's, complete but for its workers.
        family: of the base model.
        shapes: of the base model's tensors, by their names.

    Raises:
        SettingError: the first such setting, in one sentence.
    """
    due = [
        problem
        for limit, problems in PROBLEMS.items()
        if limit in family.limits
        for problem in problems
    ]
    for problem in (*due, convolution_problem, engines_problem, kernels_problem):
        found = problem(vllm_config, shapes)
        if found is not None:
            raise SettingError(found)


def float16_problem(vllm_config, shapes: Shapes) -> str | None:
    """The first layer divides the residual by the routed scaling factor in float16."""
    import torch

    if vllm_config.model_config.dtype != torch.float16:
        return None
    return (
        "--dtype is float16, in which vLLM's layers of this family scale the residual, and AttnRes "
        "has none to scale; choose bfloat16 or float32."
    )


def sequence_parallel_problem(vllm_config, shapes: Shapes) -> str | None:
    """Tensor, data and expert parallelism together split the tokens of a residual over workers."""
    if not vllm_config.parallel_config.use_sequence_parallel_moe:
        return None
    return (
        "expert parallelism with tensor and data parallelism splits the residual of this family's "
        "layers over workers, which AttnRes does not support; leave one of the three out."
    )


def lightning_problem(vllm_config, shapes: Shapes) -> str | None:
    """The kernel of lightning attention for GPUs; on a CPU it is ours."""
    if device.is_cpu():
        return None
    return (
        "vLLM's kernel of lightning attention computes prompts of more than 256 tokens, and those "
        "in chunks, by another function than their continuation; serve this family on a CPU."
    )


def caches_problem(vllm_config, shapes: Shapes) -> str | None:
    """Workers agree on one layout of caches and on groups of them, on CPU by the layers they have.

    Recurrent layers alone have another layout, and none of them no group to copy states in.
    """
    if not device.is_cpu():
        return None
    return _stages_problem(
        vllm_config,
        shapes,
        {"a KV cache": footprint.cached_layers, "a recurrent state": footprint.convolved_layers},
        "which vLLM cannot run beside other stages on CPU",
    )


def experts_problem(vllm_config, shapes: Shapes) -> str | None:
    """The class looks for a layer with experts in every stage, and raises where there is none."""
    kinds = {"experts": footprint.expert_layers}
    return _stages_problem(vllm_config, shapes, kinds, "which vLLM's class of this family needs")


def _stages_problem(
    vllm_config, shapes: Shapes, kinds: Mapping[str, Callable[[Shapes], set[int]]], why: str
) -> str | None:
    """A sentence for the first pipeline stage that has no layer of a kind of the model's layers.

    Args:
        vllm_config: vLLM's.
        shapes: of the model's tensors.
        kinds: what layers have, with the functions that give their numbers.
        why: what is wrong with such a stage, as a part of the sentence.
    """
    from vllm.distributed.utils import get_pp_indices

    stages = vllm_config.parallel_config.pipeline_parallel_size
    layers = vllm_config.model_config.hf_text_config.num_hidden_layers
    for name, numbers in ((name, find(shapes)) for name, find in kinds.items()):
        for stage in range(stages) if numbers else ():
            begin, end = get_pp_indices(layers, stage, stages)
            if numbers.isdisjoint(range(begin, end)):
                return (
                    f"the pipeline stage of the layers {begin} to {end - 1} has no layer with "
                    f"{name}, {why}; set VLLM_PP_LAYER_PARTITION so that each stage has one, or a "
                    "smaller --pipeline-parallel-size."
                )
    return None


def version_problem(vllm_config, shapes: Shapes) -> str | None:
    """What a batch says of new sequences was read, and run, from this version on."""
    if not versions.is_older_than(LINEAR_SINCE):
        return None
    since = ".".join(map(str, LINEAR_SINCE))
    return f"models with linear attention need vLLM {since} or later; install it, or a later one."


def speculation_problem(vllm_config, shapes: Shapes) -> str | None:
    """vLLM's copy of a cached state for drafts is a Triton kernel, without a form for CPUs."""
    if not device.is_cpu() or not vllm_config.num_speculative_tokens:
        return None
    if not vllm_config.cache_config.enable_prefix_caching:
        return None
    return (
        "speculative decoding on CPU is not supported with prefix caching for models with linear "
        "attention; add --no-enable-prefix-caching, or start without --speculative-config."
    )


def drafts_problem(vllm_config, shapes: Shapes) -> str | None:
    """Where vLLM computes on with the state of a rejected draft, and answers with other tokens.

    On a CPU these layers keep one state of a sequence.  Without a layer of attention the runner of
    CPUs, and the older one of GPUs, counts no accepted drafts (0.32); the newer one was not tried,
    and neither was a device that is not CUDA's.
    """
    if not (drafts := vllm_config.num_speculative_tokens):
        return None
    if device.is_cuda() and vllm_config.model_config.is_hybrid:
        return None
    return (
        f"speculative decoding with {drafts} tokens is not supported here for this family, whose "
        "recurrent states cannot go back; start without --speculative-config."
    )


def tracing_problem(vllm_config, shapes: Shapes) -> str | None:
    """vLLM's own layer of Kimi Delta Attention looks at the batch, which a compiler would fix."""
    if device.is_cpu() or vllm_config.model_config.enforce_eager:
        return None
    return (
        "this family cannot be compiled on this device, as vLLM's layer of Kimi Delta Attention is "
        "no operator of torch's; add --enforce-eager."
    )


def heads_problem(vllm_config, shapes: Shapes) -> str | None:
    """A worker has whole heads of a recurrence; vLLM looks at those of attention only."""
    workers = vllm_config.parallel_config.tensor_parallel_size
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        heads = getattr(vllm_config.model_config.hf_text_config, key, 0)
        if heads % workers:
            return (
                f"--tensor-parallel-size is {workers}, which does not divide {key}, {heads}; "
                "choose one that does."
            )
    return None


# What Hugging Face's classes call the width of a short convolution, in tokens.
CONVOLUTIONS = ("linear_conv_kernel_dim", "short_conv_kernel_size", "conv_kernel", "conv_L_cache")
WIDEST = 4


def convolution_problem(vllm_config, shapes: Shapes) -> str | None:
    """vLLM's kernel of a prompt's convolution, for GPUs, has branches for 2, 3 and 4 tokens.

    For more of them it takes one value for all, and says nothing (``causal_conv1d.py``, 0.32).
    """
    if device.is_cpu():
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


def engines_problem(vllm_config, shapes: Shapes) -> str | None:
    """Experts of several engines gather tokens by a function that vLLM 0.32 has on GPUs alone."""
    engines = vllm_config.parallel_config.data_parallel_size
    if not device.is_cpu() or engines == 1 or not footprint.expert_layers(shapes):
        return None
    return (
        f"--data-parallel-size is {engines}, by which vLLM divides a mixture of experts on GPUs "
        "alone; start as many servers without it."
    )


def kernels_problem(vllm_config, shapes: Shapes) -> str | None:
    """The kernels for drafts of vLLM 0.30 are a GPU's on a CPU too, which ends the engine."""
    if not device.is_cpu() or not vllm_config.num_speculative_tokens:
        return None
    major, minor = WITHOUT_DRAFTS
    if versions.is_older_than(WITHOUT_DRAFTS) or not versions.is_older_than((major, minor + 1)):
        return None
    return (
        f"speculative decoding on a CPU ends the engine of vLLM {major}.{minor}; install another "
        "version that is supported, or start without --speculative-config."
    )


# What refuses the settings of a limit; ``adapters`` and a workaround have the others.
PROBLEMS: dict[Limit, tuple[Callable[..., str | None], ...]] = {
    Limit.FLOAT16: (float16_problem,),
    Limit.SEQUENCE_PARALLEL: (sequence_parallel_problem,),
    Limit.LIGHTNING: (lightning_problem,),
    Limit.BOTH_CACHES: (caches_problem,),
    Limit.EXPERTS: (experts_problem,),
    Limit.LINEAR_ATTENTION: (version_problem, speculation_problem, heads_problem),
    Limit.DRAFTS: (drafts_problem,),
    Limit.EAGER_ON_GPU: (tracing_problem,),
}
