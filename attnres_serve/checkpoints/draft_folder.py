"""Whether the folder of a draft holds a head or a whole model, by config.json and tensor names.

vLLM derives the name of a head's class from the folder's architecture. If it has none, its error
lists every class.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from attnres_serve.checkpoints import hub
from attnres_serve.checkpoints.checked import translate
from attnres_serve.checkpoints.files import read_config, read_headers
from attnres_serve.checkpoints.tensor_names import tensor_names
from attnres_serve.compat import source
from attnres_serve.depth.spec import is_count
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.settings import EAGLE, EAGLE3, MODEL

Config = Mapping[str, Any]
# Parts of a folder's name that make vLLM treat a draft as a head, with any method.
NAMED = {"eagle-": EAGLE, "eagle3": EAGLE3, "dflash": "dflash", "dspark": "dspark"}
# Model types of heads that vLLM's table of drafts, or config.json, has no architecture for.
HEAD_TYPES = ("medusa", "mlp_speculator", "eagle")
OF_SPECULATORS = "speculators_model_type"  # a key of config.json files that vLLM translates
# The projection of hidden states in every EAGLE head, which no model has.
READS = re.compile(r"(^|\.)(fc|eagle_linear)\.weight$")


def named_method(model: str) -> str | None:
    """The method that vLLM infers from the name of a draft; None without one."""
    return next((method for part, method in NAMED.items() if part in model.lower()), None)


def config_of(model: str, revision: str | None) -> dict[str, Any]:
    """The config.json of a draft's folder or model id.

    Raises:
        CheckpointError: it does not exist.
    """
    folder = hub.local_path(model)
    return hub.read_config(model, revision) if folder is None else read_config(folder)


def require_head(target: ParsedConfig, method: str, model: Any, revision: str | None) -> None:
    """Check that a draft is an EAGLE head for a model.

    Args:
        target: the served checkpoint.
        method: ``eagle`` or ``eagle3``.
        model: the value of the flag.
        revision: branch, tag or commit of a model id.

    Raises:
        CheckpointError: it is no such head, or has other sizes.
    """
    begin = f"speculative decoding by {method!r} needs the folder of a draft head"
    if not isinstance(model, str) or not model:
        raise CheckpointError(f"{begin}; give it as `model`.")
    config = config_of(model, revision)
    if (problem := _head_problem(config, method, model, revision)) is not None:
        raise CheckpointError(f"{begin}, and {model} {problem}")
    if (problem := _size_problem(config, method, target)) is not None:
        raise CheckpointError(f"the draft head {model} {problem}")
    _check_projection(config, method, model)


def head_sign(config: Config, model: str, revision: str | None) -> str | None:
    """The evidence that a draft is a head, as a part of a sentence; None for a model."""
    kind, names = str(config.get("model_type")), tensor_names(model, revision) or ()
    heads = [name for name in _architectures(config) if source.lists_head(name)]
    if heads or kind in HEAD_TYPES or OF_SPECULATORS in config:
        return f"of the architecture {(heads or [kind])[0]}"
    name = next(filter(READS.search, names), None)
    return name and f"with the tensor {name}"


def unknown_class(config: Config) -> str | None:
    """The architecture of a model without a class in vLLM and transformers; None for others.

    A repository with code may have the class.
    """
    names = _architectures(config)
    if not names or "auto_map" in config or any(map(source.lists_architecture, names)):
        return None
    import transformers

    return None if any(hasattr(transformers, name) for name in names) else names[0]


def _head_problem(config: Config, method: str, model: str, revision: str | None) -> str | None:
    """The reason why a draft is no head for a method, as the end of a sentence; None for a head."""
    drafts = json.dumps({"method": MODEL, "model": model})
    whole = f"to take drafts of a whole model write {drafts}"
    if _is_attnres(config, model, revision):
        return f"is an AttnRes checkpoint; {whole}."
    if (kind := config.get(OF_SPECULATORS)) is not None:
        return None if kind == method else f"is one for the method {kind!r}."
    names = _architectures(config)
    if not any(source.lists_head(_class_name(method, name)) for name in names):
        other = EAGLE3 if method == EAGLE else EAGLE
        if any(source.lists_head(name) for name in names):
            is_other = any(source.lists_head(_class_name(other, name)) for name in names)
            return f"is one of {names[0]}, " + (
                f'for which write "method": "{other}".' if is_other else "for another method."
            )
        stated = f"has the architecture {names[0]}" if names else "names no architecture"
        usual = "LlamaForCausalLMEagle3" if method == EAGLE3 else "EagleLlamaForCausalLM"
        return (
            f"{stated} in its config.json, of which vLLM has no head; expected one such as "
            f"{usual}, or {whole}."
        )
    tensors = tensor_names(model, revision)
    if tensors and _reads_layers(config) and not any(map(READS.search, tensors)):
        return f"has no tensor fc.weight, by which a head reads hidden states; {whole}."
    return None


def _is_attnres(config: Config, model: str, revision: str | None) -> bool:
    try:
        return translate(dict(config), False, model, revision) is not None
    except CheckpointError:  # an unsupported variant
        return True


def _architectures(config: Config) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _class_name(method: str, architecture: str) -> str:
    """vLLM's name for a head's architecture (``EAGLEConfig``)."""
    if method == EAGLE:
        return architecture if architecture.startswith("Eagle") else f"Eagle{architecture}"
    is_whole = architecture.startswith("Eagle3") or architecture.endswith("Eagle3")
    return architecture if is_whole else f"Eagle3{architecture}"


def _reads_layers(config: Config) -> bool:
    return bool((config.get("eagle_config") or {}).get("use_aux_hidden_state", True))


def _size_problem(config: Config, method: str, target: ParsedConfig) -> str | None:
    """The first size in which a head differs from its model, as the end of a sentence."""
    head_config = {**(config.get("transformer_layer_config") or {}), **config}
    width = "hidden_size"
    if method == EAGLE3 and head_config.get("target_hidden_size") is not None:
        width = "target_hidden_size"
    for key, target_key in ((width, "hidden_size"), ("vocab_size", "vocab_size")):
        if head_config.get(key) not in (None, target.config[target_key]):
            return (
                f"has {key} {head_config[key]}, and the served model has {target_key} "
                f"{target.config[target_key]}; choose a head that was trained for the served model."
            )
    return None


def _check_projection(config: Config, method: str, model: str) -> None:
    """Check the shape of the projection, in which EAGLE and EAGLE-3 heads differ.

    Raises:
        CheckpointError: it reads another number of hidden states.
    """
    folder, hidden = hub.local_path(model), config.get("hidden_size")
    is_plain = not {OF_SPECULATORS, "quantization_config"} & {*config}
    if folder is None or not any(folder.glob("*.safetensors")) or not is_plain or not hidden:
        return
    headers = read_headers(folder)
    name = next((name for name in headers if READS.search(name)), None)
    if name is None:
        return
    read = [2] if method == EAGLE else _layers_read(config)
    widths = [count * (config.get("target_hidden_size") or hidden) for count in read]
    shape = headers[name].shape
    if shape[-1] not in widths:
        raise CheckpointError(
            f"the draft head {model} has the tensor {name} of {list(shape)}, and a head of "
            f"{method!r} reads {' or '.join(map(str, widths))} channels by its config.json; "
            "correct the method, or that file."
        )


def _layers_read(config: Config) -> list[int]:
    """The numbers of layers that an EAGLE-3 head may read; vLLM's classes read different keys."""
    layers = "eagle_aux_hidden_state_layer_ids"
    listed = (config.get(layers), (config.get("eagle_config") or {}).get(layers))
    stated = (config.get("num_aux_layers"), config.get("num_aux_hidden_states"))
    counts: list[Any] = [*stated, *(len(ids) for ids in listed if ids)]
    return sorted({3, *filter(is_count, counts)})
