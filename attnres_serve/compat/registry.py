"""vLLM's tables of configuration formats, architectures and model classes."""

import functools
import importlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnres_serve.compat import device
from attnres_serve.compat.patch import Patch

# The additional_config of an engine that is being made.
_additional_config: ContextVar[Any] = ContextVar("additional_config", default=None)


def install_config_parser(
    translate: Callable[[dict[str, Any], bool, str | Path, str | None], Any],
    build: Callable,
    leaves: Callable[[dict[str, Any], Any], bool],
) -> None:
    """Recognise AttnRes checkpoints wherever vLLM reads a config.json.

    The parser of the format "hf" is replaced in vLLM's table.  (Registering an AutoConfig for a
    name as general as ``transformer`` would hijack foreign repositories; a new format would need a
    flag.)

    Args:
        translate: a function of config.json, "may run the repository's code", the model's folder
            or id and its revision; gives a ParsedConfig, or None.
        build: a function of a ParsedConfig, the model's name and whether it is for drafts; gives a
            Hugging Face config.
        leaves: a function of config.json and additional_config; whether vLLM's class serves it.
    """
    from transformers import PreTrainedConfig
    from vllm.transformers_utils import config as vllm_config

    table = vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER
    parser: Any = table["hf"]
    if getattr(parser, "understands_attnres", False):
        return

    class AttnResConfigParser(parser):
        understands_attnres = True

        def parse(self, model, trust_remote_code, revision=None, code_revision=None, **kwargs):
            try:
                content, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
            except Exception:
                content = {}  # vLLM's parser will raise the error
            overrides = kwargs.get("hf_overrides")
            if isinstance(overrides, dict):  # they use the checkpoint's keys, so before parsing
                content = {**content, **overrides}
            parsed = None
            if not leaves(content, _additional_config.get()):
                parsed = translate(content, trust_remote_code, model, revision)
            if parsed is None:
                return super().parse(model, trust_remote_code, revision, code_revision, **kwargs)
            return content, build(parsed, str(model), _is_for_drafts(overrides))

    table["hf"] = AttnResConfigParser
    PATCH.apply()


def _is_for_drafts(overrides: Any) -> bool:
    """Whether a config.json is read for drafts, by the function with which vLLM overrides it."""
    from vllm.config.speculative import SpeculativeConfig

    composed = getattr(
        SpeculativeConfig, "_apply_composed_hf_override", None
    )  # with a user's override
    for_drafts = SpeculativeConfig.hf_config_override, composed
    return overrides is not None and getattr(overrides, "func", overrides) in for_drafts


def _hearing_additional_config(create: Callable) -> Callable:
    """Keep the additional_config available while vLLM reads a config.json."""

    def create_model_config(self):
        token = _additional_config.set(self.additional_config)
        try:
            return create(self)
        finally:
            _additional_config.reset(token)

    return create_model_config


def register_architecture(architecture: str, base: str, target: str, on_config: Callable) -> None:
    """Register a model class by name.

    Args:
        architecture: our name.
        base: the architecture of the vLLM class that ours extends.  vLLM's special cases for it
            apply to ours too.
        target: module and name of the class.
        on_config: called when a VllmConfig for it is made.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    of_base = MODELS_CONFIG_MAP.get(base)

    def both(vllm_config) -> None:
        of_base.verify_and_update_config(vllm_config)
        on_config(vllm_config)

    MODELS_CONFIG_MAP[architecture] = type(
        "AttnResConfigHook",
        (of_base or VerifyAndUpdateConfig,),
        {"verify_and_update_config": staticmethod(both if of_base else on_config)},
    )
    for patch in (LIST,) if device.is_cpu() else (LIST, GRAPHS):
        lists, (name,) = importlib.import_module(str(patch.of)), patch.targets
        if base in getattr(lists, name, ()):
            patch.apply_to(lists, lambda names: names | {architecture})
    register_class(architecture, target)


def register_class(architecture: str, target: str) -> None:
    """Register a class by name, as module:class; on a CPU this process inspects it.

    On other devices vLLM inspects it in another process, so that CUDA is not initialised in this
    one.  Importing vLLM there takes 8 s, and the cached result survives an upgrade of vLLM.
    """
    from vllm import ModelRegistry

    if device.is_cpu():
        ModelRegistry.models[architecture] = _inspected_here()(*target.split(":"))
    else:
        ModelRegistry.register_model(architecture, target)


@functools.cache
def _inspected_here() -> type:
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelInfo

    class InspectedHere(_LazyRegisteredModel):
        def inspect_model_cls(self):
            return _ModelInfo.from_model_cls(self.load_model_cls())

    return InspectedHere


PATCH = Patch(
    targets=("vllm.engine.arg_utils:EngineArgs.create_model_config",),
    make=_hearing_additional_config,
    why="the parser needs `--additional-config`; no fault",
    models="every model",
    first=(0, 28),
)
# vLLM's lists of architectures with special treatment.
LIST = Patch(
    targets=("FLASHINFER_MOE_EP_ARCHITECTURES",),
    of="vllm.config.kernel",
    why="our architectures are added; no fault",
    models="every model",
    first=(0, 28),
)
# vLLM does not warm up listed architectures on a CPU, but pipelines need the warm-up.
GRAPHS = replace(
    LIST,
    targets=("DEFAULT_BREAKABLE_CUDAGRAPH_ARCHITECTURES",),
    of="vllm.config.vllm",
    models="every model on a GPU",
)
