"""Resetting a vLLM model in a running engine, and loading it again.

vLLM's reload goes layer by layer, counts tensors, and does not repeat all steps of the start: on a
CPU, experts and tied heads stay packed from old weights (``replaced_weights``).  Here parameters
return to their state after construction. Then vLLM's steps of a start follow: load and process.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

TARGET, DRAFT = "target", "draft"  # models of a worker
# Flags of layers that vLLM has processed.
_PROCESSED = "_already_called_process_weights_after_loading"
_Layout = tuple[torch.Size, tuple[int, ...], int]  # size, stride and offset of a view
_EDGE = 16  # elements at both ends of a parameter that tell how it was filled


class Update(Protocol):
    """Tensors of an update, which are kept until all have arrived."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Validate a tensor and keep a copy.

        Raises:
            CheckpointError: it is unknown, has a wrong shape, is not finite or a duplicate.
        """

    def apply(self) -> None:
        """Load the tensors into the model.

        Raises:
            CheckpointError: one is missing; nothing was changed.
        """


class _Parameter:
    """The state of a parameter after its model was built, without its storage.

    Other modules may refer to it, as routers do to the bias of a gate. So the same object is used
    again while it is alive.
    """

    def __init__(self, parameter: Tensor) -> None:
        data = parameter.data
        self._reference, self._cls = ref(parameter), type(parameter)
        self._attributes = dict(vars(parameter))
        self._like, self._device, self._fill = data.to("meta"), data.device, _fill(data)

    def make(self) -> Tensor:
        like = self._like
        data = torch.empty_strided(
            like.size(), like.stride(), dtype=like.dtype, device=self._device
        ).fill_(self._fill)
        if (made := self._reference()) is None:
            made = torch.Tensor._make_subclass(self._cls, data, False)
            self._reference = ref(made)
        made.data = data
        vars(made).clear()
        vars(made).update(self._attributes)
        return made


def _fill(data: Tensor) -> float:
    """The constant that fills a new parameter, such as 1; 0 if its memory was not written.

    A checkpoint need not fill all of it: experts are padded, for example.
    """
    if data.is_meta or not data.numel() or not data.is_contiguous():
        return 0
    flat = data.view(-1)
    edges = torch.cat([flat[:_EDGE], flat[-_EDGE:]]).float()
    first = float(edges[0])
    return first if bool((edges == first).all()) else 0


class Blank:
    """The parameters and buffers of a model that was built but not loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters: WeakKeyDictionary[nn.Module, dict[str, _Parameter]] = WeakKeyDictionary()
        self._buffers: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
        # Buffers that are views of a parameter, as in Mamba's layers.
        self._views: WeakKeyDictionary[nn.Module, dict[str, tuple[_Parameter, _Layout]]]
        self._views = WeakKeyDictionary()
        known: dict[int, _Parameter] = {}  # tied ones are one object
        storages: dict[int, _Parameter] = {}
        for module in model.modules():
            parameters = self._parameters[module] = {}
            for name, tensor in _there(module._parameters).items():
                parameters[name] = known.setdefault(id(tensor), _Parameter(tensor))
                storages[_storage(tensor)] = parameters[name]
        for module in model.modules():
            self._buffers[module], self._views[module] = {}, {}
            for name, tensor in _there(module._buffers).items():
                if (parameter := storages.get(_storage(tensor))) is not None:
                    layout = tensor.size(), tensor.stride(), tensor.storage_offset()
                    self._views[module][name] = parameter, layout
                elif name not in module._non_persistent_buffers_set:
                    self._buffers[module][name] = tensor.clone()

    def restore(self, model: nn.Module) -> None:
        """Give the original modules of a model blank parameters, tied as before."""
        made: dict[_Parameter, Tensor] = {}
        modules = [module for module in model.modules() if module in self._parameters]
        for module in modules:
            for name in _there(module._parameters):
                del module._parameters[name]
            for name, parameter in self._parameters[module].items():
                if parameter not in made:
                    made[parameter] = parameter.make()
                vars(module).pop(name, None)
                module._parameters[name] = made[parameter]  # type: ignore[assignment]
            _forget(module)
        for module in modules:
            for name, value in self._buffers[module].items():
                module._buffers[name].copy_(value)  # type: ignore[union-attr]
            for name, (parameter, layout) in self._views[module].items():
                module._buffers[name] = made[parameter].data.as_strided(*layout)

    def shared(self, model: nn.Module) -> list[Tensor]:
        """The parameters that a draft model shares with the served one."""
        others = (module for module in model.modules() if module not in self._parameters)
        return [parameter for module in others for parameter in module.parameters(recurse=False)]


def _there(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's storage; a unique number for one without memory."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def _forget(module: nn.Module) -> None:
    """Let vLLM process a layer like the first time."""
    vars(module).pop(_PROCESSED, None)
    method: Any = getattr(module, "quant_method", None)
    if getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None


blanks: WeakKeyDictionary[nn.Module, Blank] = WeakKeyDictionary()  # by their models


@contextmanager
def _left_alone(parameters: list[Tensor]) -> Iterator[None]:
    """Keep vLLM from loading into parameters."""
    loaders = [(vars(one), vars(one).get("weight_loader")) for one in parameters]
    for attributes, _ in loaders:
        attributes["weight_loader"] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for attributes, loader in loaders:
            del attributes["weight_loader"]
            if loader is not None:
                attributes["weight_loader"] = loader


def renew(model: nn.Module, model_config: Any, load: Callable[[], Any]) -> None:
    """Load a model again like at the start.

    Args:
        model: one of ``blanks``.
        model_config: vLLM's configuration of that model.
        load: fills the parameters.  If it raises, the model has no weights.
    """
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    blank = blanks[model]
    blank.restore(model)
    device = next(model.parameters()).device
    with set_default_torch_dtype(model_config.dtype), _left_alone(blank.shared(model)):
        load()
        process_weights_after_loading(model, model_config, device)
