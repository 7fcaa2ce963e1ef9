"""LoRA adapters: what vLLM's layers do not take, known before an engine starts.

What only an adapter's own files show is in ``adapter_files``, and what only the model that takes it
in ``workarounds.whole_adapters``.
"""

import re

from attnres_serve.compat import device
from attnres_serve.families.family import Family
from attnres_serve.families.limits import Limit

EXPERTS = "experts"  # the layer of a mixture, also as a part of what is named in it
REMEDY = "start without --enable-lora, and merge the adapter into the weights."


def problem(vllm_config, family: Family, has_experts: bool) -> str | None:
    """Why a model takes no adapters as they were asked for, in one sentence; None where it does.

    Args:
        vllm_config: vLLM's, complete but for its workers.
        family: of the base model.
        has_experts: whether a layer of the model is a mixture of experts.
    """
    if vllm_config.lora_config is None:
        return None
    if Limit.ADAPTERS in family.limits:
        return f"LoRA adapters are not supported on {family.title}; {REMEDY}"
    workers = vllm_config.parallel_config.tensor_parallel_size
    if Limit.ADAPTERS_OF_WORKERS in family.limits and workers > 1:
        return (
            f"--tensor-parallel-size is {workers}, with which vLLM cuts LoRA adapters of this "
            f"family otherwise than its weights; serve it on one worker, or {REMEDY}"
        )
    targets = vllm_config.lora_config.target_modules
    if (
        not has_experts
        or not device.is_cpu()
        or (targets and not any(EXPERTS in target.split(".") for target in targets))
    ):
        return None
    named = f"is {' '.join(targets)}" if targets else "is not given"
    return (
        "LoRA adapters of experts run on a GPU alone, by a Triton kernel, and "
        f"--lora-target-modules {named}; name layers beside the experts with it, for example "
        f"q_proj k_proj v_proj o_proj, or {REMEDY}"
    )


def name_of(adapter: str) -> str:
    """How the sentence begins that refuses an adapter."""
    return f"the LoRA adapter {adapter!r}"


def refusal_in(message: str, adapter: str) -> str | None:
    """The sentence that refuses an adapter, out of what vLLM's engine says of it; None without one.

    Args:
        message: of the error that the engine's client raises.
        adapter: its name.
    """
    found = re.search(rf"{re.escape(name_of(adapter))} .*\.(?=', please check|$)", message)
    return found[0] if found else None
