"""A quantised checkpoint against the parameters that vLLM made for it."""

from collections.abc import Collection

from torch import nn

from attnres_serve.checkpoints import quantized
from attnres_serve.checkpoints.read import DTYPES
from attnres_serve.checkpoints.tensor_index import TensorIndex
from attnres_serve.checkpoints.tensors import FLOATS
from attnres_serve.compat import decoder
from attnres_serve.errors import CheckpointError


def require_one_quantisation(model: nn.Module, index: TensorIndex, loaded: Collection[str]) -> None:
    """Raise CheckpointError if the checkpoint's dtypes differ from vLLM's.

    vLLM would cast weights of another dtype, and multiply by uninitialised scales.

    Args:
        model: a quantised model, before its weights are processed.
        index: all tensors of the checkpoint.
        loaded: names of the loaded parameters.
    """
    for name in filter(quantized.is_weight, index.stored):
        parameter, dtype = decoder.parameter(model, name), index.stored[name].dtype
        vllm_dtype = dtype if parameter is None else DTYPES.get(parameter.dtype, dtype)
        if dtype != vllm_dtype and not {dtype, vllm_dtype} <= {*FLOATS}:
            raise CheckpointError(
                f"the tensor {index.stored_names[name]} holds {dtype}, but by "
                f"quantization_config vLLM reads {vllm_dtype}; quantization_config must "
                "say how each layer is quantised."
            )
    if missing := _unfilled(model, loaded):
        raise CheckpointError(
            f"vLLM needs {missing[0]} by quantization_config, and no tensor of the checkpoint "
            "gives it; quantization_config must name the layers that are quantised, and the "
            "checkpoint must hold all that their quantisation wrote."
        )


def _unfilled(model: nn.Module, loaded: Collection[str]) -> list[str]:
    """Parameters of a quantised model that no tensor of a checkpoint filled.

    vLLM checks this only for models that are not quantised.  Parameters that a checkpoint need not
    hold are left out: scales of a KV cache, weights quantised during loading or made from the
    configuration, and empty ones.
    """
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    spared: set[int] = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        online = getattr(method, "uses_meta_device", False)
        for name, parameter in module.named_parameters(recurse=False):
            if online or isinstance(method, BaseKVCacheMethod) or name == "input_scale_ub":
                spared.add(id(parameter))
    return [
        name
        for name, parameter in model.named_parameters()
        if name not in loaded and id(parameter) not in spared and parameter.numel()
    ]
