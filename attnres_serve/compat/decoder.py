"""vLLM's model objects inside a worker: norms, layers, parameters and pipeline stages."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from zlib import crc32

_NAMES = ("model", "backbone")  # attributes of vLLM's models for their decoder


def name_in(model) -> str:
    """The attribute of a vLLM model that holds its decoder."""
    return next(name for name in _NAMES if hasattr(model, name))


def of(model) -> Any:
    """The decoder of a vLLM model."""
    return getattr(model, name_in(model))


def is_norm(module) -> bool:
    """Whether a module is one of vLLM's two RMSNorms, with weight w or 1 + w."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    return isinstance(module, RMSNorm | GemmaRMSNorm)


def adds_one(norm) -> bool:
    """Whether a norm multiplies by 1 + weight."""
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm

    return isinstance(norm, GemmaRMSNorm)


def is_plain_norm(module) -> bool:
    """Whether a module is exactly an RMSNorm with a weight over whole rows.

    A subclass may compute something else: K2 Horizon's norms groups of a row.
    """
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    if not is_norm(module):
        return False
    base: type = GemmaRMSNorm if adds_one(module) else RMSNorm
    kept = (getattr(type(module), name) is getattr(base, name) for name in _COMPUTE)
    if not all(kept):
        return False
    return adds_one(module) or (module.has_weight and module.variance_size_override is None)


_COMPUTE = ("forward", "forward_native")  # methods of a norm


def is_elsewhere(module) -> bool:
    """Whether a module is a placeholder for one on another pipeline stage."""
    from torch import nn

    return isinstance(module, nn.Identity)  # vLLM's PPMissingLayer is one


def empty_intermediate_tensors(rows: int, hidden: int) -> Callable:
    """The factory of a pipeline stage's input: hidden states and the packed depth state."""
    import torch
    from vllm.sequence import IntermediateTensors

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        return IntermediateTensors(
            {
                "hidden_states": torch.zeros((batch_size, hidden), dtype=dtype, device=device),
                "residual": torch.zeros((batch_size, rows, hidden), dtype=dtype, device=device),
            }
        )

    return make


def forward_one_token(model, weight) -> None:
    """Run a decoder's uncompiled forward on one token of zeros.

    Args:
        model: the decoder.
        weight: of one of its norms, with the size, dtype and device of activations.
    """
    import torch
    from vllm.distributed import get_pp_group
    from vllm.forward_context import override_forward_context

    positions = torch.zeros(1, dtype=torch.long, device=weight.device)
    with override_forward_context(_NO_METADATA):
        if get_pp_group().is_first_rank:
            embeds = torch.zeros((1, weight.numel()), dtype=weight.dtype, device=weight.device)
            type(model).forward(model, None, positions, None, inputs_embeds=embeds)
        else:
            received = model.make_empty_intermediate_tensors(1, weight.dtype, weight.device)
            type(model).forward(model, None, positions, received)


# Some decoders pass the attention metadata to their layers.
_NO_METADATA: Any = SimpleNamespace(attn_metadata=None)


def is_on_this_stage(model, name: str) -> bool:
    """Whether a tensor, by its house name, belongs to a module of this pipeline stage."""
    from vllm.model_executor.models.utils import PPMissingLayer

    module = model
    for part in name.split("."):
        if isinstance(module, PPMissingLayer):
            return False
        module = getattr(module, part, None)
    return True


def parameter(model, name: str) -> Any:
    """The parameter for a tensor, by its house name, or the one that fuses it; or None."""
    packed = getattr(model, "packed_modules_mapping", {})  # missing in vLLM's Mamba2
    fused = {part: whole for whole, parts in packed.items() for part in parts}
    target = model
    for part in name.split("."):
        target = getattr(target, fused.get(part, part), None)
    return target


def all_workers(flag: bool) -> bool:
    """Whether a flag is true on every worker of this engine."""
    import torch
    from vllm.distributed import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return flag
    flags = torch.tensor([int(flag)], device="cpu")  # the default device may be another
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flags)


def inner_model(worker):
    """The model object of a worker, without wrappers for LoRA or graphs."""
    return worker.model_runner.get_model()


def is_first_worker() -> bool:
    from vllm.distributed import get_world_group

    return bool(get_world_group().is_first_rank)


def is_ours_to_look_at(name: str) -> bool:
    """Whether this worker checks the values of a tensor.

    Workers read the same files, so one worker checks each tensor, chosen by its name.  Every
    worker checks the experts that it reads, which others may not read.
    """
    from vllm.distributed import get_world_group

    group = get_world_group()
    return "expert" in name or crc32(name.encode()) % group.world_size == group.rank_in_group


def is_first_tensor_rank() -> bool:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0
