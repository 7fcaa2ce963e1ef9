"""LoRA adapters: what vLLM's layers do not take, known before an engine starts.

What only an adapter's own files show is in ``adapter_files``, and what only the model that takes it
in ``workarounds.whole_adapters``.
"""

import re

from attnres_serve.compat import host
from attnres_serve.compat.backbone_limits import DELTA_NETS, OWN_MODULES, is_one_of

# A test compares them with the installed vLLM.
WITHOUT_LORA = (*DELTA_NETS, "bailing_moe_linear", "mamba2")
EXPERTS = "experts"  # the layer of a mixture, also as a part of what is named in it
# Whose projections are rows of one by a rule of their own, and an adapter's are cut by another.
NOT_SHARED = ("qwen3_next", "nemotron_h")
REMEDY = "start without --enable-lora, and merge the adapter into the weights."


def problem(vllm_config, module: str, has_experts: bool) -> str | None:
    """Why a model takes no adapters as they were asked for, in one sentence; None where it does.

    Args:
        vllm_config: vLLM's, complete but for its workers.
        module: name of the module that defines the family's layers.
        has_experts: whether a layer of the model is a mixture of experts.
    """
    if vllm_config.lora_config is None:
        return None
    if is_one_of(module, OWN_MODULES):
        # An adapter of a projection that every worker has whole is cut, as if it were shared.
        return f"LoRA adapters are not supported on layers of Kimi Delta Attention; {REMEDY}"
    if is_one_of(module, WITHOUT_LORA):
        return f"LoRA adapters are not supported by the class of this family; {REMEDY}"
    workers = vllm_config.parallel_config.tensor_parallel_size
    if is_one_of(module, NOT_SHARED) and workers > 1:
        return (
            f"--tensor-parallel-size is {workers}, with which vLLM cuts LoRA adapters of this "
            f"family otherwise than its weights; serve it on one worker, or {REMEDY}"
        )
    targets = vllm_config.lora_config.target_modules
    if (
        not has_experts
        or not host.on_cpu()
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
