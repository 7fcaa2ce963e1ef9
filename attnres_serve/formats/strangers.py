"""Models whose layers are connected neither by standard nor by Attention Residuals.

They have the architecture of a plain model, and some have its tensors too: vLLM would serve the
plain model instead.
"""

import re
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attnres_serve.compat import source
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES, normed_llama
from attnres_serve.families.family import Family
from attnres_serve.formats import baseline_attnres, connections
from attnres_serve.formats.baseline_attnres import MODE, PATTERN, SETTINGS, SWITCH

_MODES = {
    "denseformer": "DenseFormer, whose layers read a learned average of all earlier outputs",
    "densetransformer": "DenseFormer, whose layers read a learned average of all earlier outputs",
    "mhc": "mHC, manifold-constrained hyper-connections of several residual streams",
}
_DEPTH_MODES = ("depth_attention", "depth_softmax")  # of MODE; each turns Depth-Attention on
_OWN_CODE = "run it with the code that it was trained with"
_OR_REMOVE = f"{_OWN_CODE.capitalize()}, or remove the key if it was trained without."
_OF_NORMED_LLAMA = {
    normed_llama.NORMS: "norms of queries and keys",
    normed_llama.SCALE: "scaled embeddings",
}


def plain_family(config: dict[str, Any]) -> Family | None:
    """The family with standard residuals as which vLLM would serve a config.json; None if unknown.

    Several architectures may stand for one vLLM class.
    """
    stock = [family for family in FAMILIES.values() if family.is_stock]
    name = architecture(config)
    if name is None:
        return next((one for one in stock if one.hf == config.get("model_type")), None)
    cls = source.listed_class(name)
    named = [one for one in stock if one.stock_architecture == name]
    return next(iter(named or [one for one in stock if one.cls == cls]), None)


def architecture(config: dict[str, Any]) -> str | None:
    """The first of a config.json's architectures."""
    architectures = config.get("architectures")
    return str(architectures[0]) if isinstance(architectures, list) and architectures else None


def refuse_sisters(config: dict[str, Any]) -> None:
    """Raise CheckpointError for the other models of the code that trained AttnRes-3B."""
    if plain_family(config) is None:
        return
    for key in baseline_attnres.MODES:
        if connections.is_set(key, config):
            _refuse_mode(config, key)
    for key in (SWITCH, PATTERN, MODE):
        if _turns_depth_attention_on(key, config):
            raise CheckpointError(
                f"config.json has {key}: {config[key]!r}, a setting of Depth-Attention (arXiv "
                "2606.05014), in which attention also reads keys and values of earlier layers. It "
                "adds no tensor, so it would be served as a plain model and answer wrongly; "
                f"{_OWN_CODE}."
            )


def refuse(
    config: dict[str, Any], names: Callable[[], Collection[str] | None] = lambda: None
) -> None:
    """Raise CheckpointError for a plain model with a key that connects its layers differently.

    Plain models are those of families that vLLM has. Keys of the family's class are allowed.

    Args:
        config: the content of config.json.
        names: gives the names of the checkpoint's tensors, None if they are not available.
    """
    family = plain_family(config)
    if family is None:
        return
    text = config.get("text_config")
    for part in (config, text) if isinstance(text, dict) else (config,):
        for key, value in part.items():
            if key in SETTINGS or not connections.speaks_of_them(key):
                continue
            if connections.is_set(key, part) and not _knows(family, config, key):
                raise CheckpointError(
                    f"config.json has {key}: {value!r}, by its name a setting of how layers are "
                    f"connected, which {architecture(config) or family.stock_architecture} does "
                    f"not have; vLLM would serve a plain {family.title} with standard residuals "
                    f"instead. {_OR_REMOVE}"
                )
    if family.name == "llama":
        _refuse_normed_llama(config, family, names)


def _refuse_normed_llama(
    config: dict[str, Any], family: Family, names: Callable[[], Collection[str] | None]
) -> None:
    """Raise for a Llama with standard residuals but other attention or embeddings."""
    for key, what in _OF_NORMED_LLAMA.items():
        if not connections.is_set(key, config) or _knows(family, config, key):
            continue
        tensors = names() if key == normed_llama.NORMS else None
        if tensors is None or any(".q_norm." in name for name in tensors):
            raise CheckpointError(
                f"config.json has {key}: {config[key]!r} and standard residuals; vLLM's Llama has "
                f"no {what}, and here they are served with Attention Residuals alone. {_OR_REMOVE}"
            )


def _refuse_mode(config: dict[str, Any], key: str) -> None:
    """Raise unless a key of ``baseline_attnres.MODES`` makes this a checkpoint of that format."""
    value = config[key]
    if sister := _MODES.get(re.sub(r"[\W_]", "", str(value)).lower()):
        raise CheckpointError(
            f"config.json has {key}: {value!r}, which is {sister}. It is another function than "
            f"Attention Residuals and is not supported; {_OWN_CODE}."
        )
    if baseline_attnres.means_attnres(value) and not baseline_attnres.matches(config):
        raise CheckpointError(
            f"config.json has {key}: {value!r} beside model_type {config.get('model_type')!r} "
            f"and architectures {config.get('architectures')!r}; the code that writes it has "
            "'llama' and ['LlamaForCausalLM'] alone."
        )
    if not baseline_attnres.means_attnres(value) and config.get("model_type") == "llama":
        raise CheckpointError(
            f"config.json has {key}: {value!r}, which is no baseline that is known; supported "
            f"is {key} 'attnres', or the key removed from a model with standard residuals."
        )


def _turns_depth_attention_on(key: str, config: dict[str, Any]) -> bool:
    """Whether a key turns it on; the mode does only without the switch and a baseline."""
    if key != MODE:
        return connections.is_set(key, config)
    is_decided = SWITCH in config or baseline_attnres.matches(config)
    return config.get(MODE) in _DEPTH_MODES and not is_decided


def _knows(family: Family, config: dict[str, Any], key: str) -> bool:
    """Whether the class of a config.json's model type or family reads a key."""
    types = {family.hf, str(config.get("model_type"))}
    if any(_is_named(one, key) for one in types):
        return True
    stated = () if family.has_hf_class else family.keys()
    return key in stated


def _is_named(hf: str, key: str) -> bool:
    """Whether the source file of a model type's configuration contains a key.

    The file is read as text, because importing transformers is the slowest part of a refusal.
    """
    package = find_spec("transformers")
    if package is None or package.origin is None or not re.fullmatch(r"[\w-]+", hf):
        return False
    folder = hf.replace("-", "_").removesuffix("_text")
    files = (Path(package.origin).parent / "models" / folder).glob("configuration_*.py")
    word = re.compile(rf"\b{re.escape(key)}\b")
    return any(word.search(file.read_text(encoding="utf-8")) for file in files)
