"""Families with facts from their Hugging Face classes.

Names and shapes come from the class on the meta device. The conversions that ``transformers``
makes when it loads a checkpoint are reverted, so they are those of a checkpoint on disk.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import Any

from attnres_serve.depth.layout import COMMON, ONE, Layout
from attnres_serve.errors import CheckpointError, first_line
from attnres_serve.families import checks, experts, footprint, idle_experts, latent, rotary
from attnres_serve.families.family import HEAD, Check, Config, Family, Held, Shape
from attnres_serve.families.in_memory import held

NORMS = tuple(norm for _, norm in COMMON)
ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")  # transformers reads all of them
STATED = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
# Of all these families: vLLM fuses the layers of a line into one if the model has them.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)


def family(
    name: str,
    *,
    norms: tuple[str, ...] = NORMS,
    stated: tuple[str, ...] = STATED,
    final_norm: str = "norm",
    also: tuple[str, ...] = (),
    only: Mapping[str, tuple[Any, ...]] | None = None,
    more_checks: tuple[Check, ...] = (),
    activations: tuple[str, ...] = ("silu",),
    rotates_part: bool = False,
    is_latent: bool = False,
    heads: tuple[Check, ...] = (checks.groups, checks.even_heads),
    rope: Check | None = None,
    kinds: tuple[str, ...] = (),
    recurrent_bytes: Callable[[Config, int], int] = lambda config, width: 0,
    stand_in: Callable[[Config], Config] = lambda config: config,
    adjust: Callable[[Config, dict[str, Shape]], dict[str, Shape]] = lambda config, shapes: shapes,
    hf: str | None = None,
    **rest: Any,
) -> Family:
    """A family by its Hugging Face class.

    Args:
        name: the key in ``FAMILIES``, also the model type if ``hf`` is None.
        norms: the norms before the sublayers of a layer, attention first; one if a layer has
            one sublayer.
        stated: the keys that config.json must state, whole numbers.
        final_norm: the norm before the head.
        also: keys of a config.json that both classes read although the configuration's class has
            no such fields.
        only: supported values by key, for keys with values that vLLM and Hugging Face's class
            read differently; the first is what a missing key means.
        more_checks: checks in addition to the common ones.
        activations: the supported values of ``hidden_act``, the usual one first.
        rotates_part: whether ``partial_rotary_factor`` is supported.
        is_latent: whether attention is latent.
        heads: the checks of heads, if attention is not latent or rotates nothing.
        rope: the check of the rotary embedding, if layers have more than one.
        kinds: the supported kinds in ``layer_types``, which both classes read; none if all layers
            have full attention.
        recurrent_bytes: gives the bytes of a sequence's state in one recurrent layer, without its
            convolution, from a config.json and the bytes of an activation.
        stand_in: gives the config.json for Hugging Face's class, from one with more than the class
            knows.
        adjust: gives the shapes of a checkpoint, from a config.json and the class' shapes.
        hf: the model type on Hugging Face.
        rest: fields of ``Family`` that differ from the usual ones.
    """
    hf = hf or name
    part = (rotary.PART,) if rotates_part else ()
    scales = latent.SCALES if is_latent else ()
    names = (ONE,) if len(norms) == 1 else tuple(kind for kind, _ in COMMON)
    parts = tuple(zip(names, norms, strict=True))

    def fields(config: Config) -> str:
        return json.dumps(_fields(stand_in(config)), sort_keys=True)

    def shapes(config: Config) -> dict[str, Shape]:
        return adjust(config, _shapes(hf, fields(config)))

    def in_memory(config: Config) -> dict[str, Held]:
        return held(_model(hf, fields(config)), shapes(config))

    def state_bytes(config: Config, width: int) -> int:
        tensor_shapes = shapes(config)
        recurrent = footprint.recurrent_layers(tensor_shapes) * recurrent_bytes(config, width)
        return footprint.convolution_elements(tensor_shapes) * width + recurrent

    def idle_elements(config: Config) -> int:
        return idle_experts.elements(shapes(config), chosen_experts(hf, stand_in(config)))

    usual: dict[str, Any] = {
        "title": name,
        "hf": hf,
        "usual_eps": None,  # the classes' defaults differ
        "keys": lambda: keys(hf) | {*also, *part},
        "layout": lambda config: Layout.of(config.get("num_hidden_layers"), parts, final_norm),
        "shapes": shapes,
        "in_memory": in_memory if rest.get("has_hf_class", True) else lambda config: {},
        "checks": (
            *(
                lambda _, config: checks.require_counts(config, stated),
                only_values(only or {}),
                partial(checks.values, activations=activations),
            ),
            checks.kinds(*kinds) if kinds else checks.full_attention,
            *((latent.check,) if is_latent else heads),
            rope or partial(rotary.check, also=part + scales),
            *((rotary.part,) if rotates_part else ()),
            *((latent.rope,) if is_latent else ()),
            *more_checks,
        ),
        "window": None,
        "cache_elements": lambda config: footprint.cache_elements(shapes(config)),
        "state_bytes": state_bytes,
        "idle_elements": idle_elements,
        "fused": FUSED,
        "is_latent": is_latent,
    }
    if is_latent:
        usual["head_size"] = latent.head_size
    return Family(name=name, **usual | rest)


def config_class(hf: str) -> Any:
    """Hugging Face's configuration class of a model type, even if vLLM registered another."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return getattr(transformers, CONFIG_MAPPING_NAMES[hf])


@cache
def keys(hf: str) -> frozenset[str]:
    """The keys of config.json that a model type's configuration reads."""
    from dataclasses import fields

    from transformers import PreTrainedConfig

    cls = config_class(hf)
    common = {field.name for field in fields(PreTrainedConfig)}
    declared = {field.name for field in fields(cls)} - common
    return frozenset(declared | {*cls.attribute_map, *cls.attribute_map.values(), *ROTARY})


@lru_cache(maxsize=8)
def _shapes(hf: str, config: str) -> dict[str, Shape]:
    """The shape of every tensor of a checkpoint, by its name.

    Args:
        hf: model type.
        config: the fields of its configuration, as JSON.

    Raises:
        CheckpointError: Hugging Face's class refuses them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    try:
        model = _model(hf, config)
        tensors = revert_weight_conversion(model, model.state_dict())
    except Exception as error:  # of any kind: the classes compute with what config.json says
        raise CheckpointError(
            f"Hugging Face's {hf} does not read config.json ({first_line(error)})."
        ) from None
    if model.config.tie_word_embeddings:
        tensors.pop(HEAD, None)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


@lru_cache(maxsize=1)
def _model(hf: str, config: str) -> Any:
    """The model on the meta device, with the conversions between memory and disk."""
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.conversion_mapping import get_model_conversion_mapping

    hf_config = config_class(hf).from_dict(json.loads(config))
    with torch.device("meta"):
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)](hf_config)
    model._weight_conversions = get_model_conversion_mapping(model)
    return model


def chosen_experts(hf: str, config: Config) -> int:
    """Experts that a token sees in a layer with experts, by config.json or the class' default."""
    hf_config = config_class(hf).from_dict(_fields(config))
    return next(
        (int(getattr(hf_config, key)) for key in experts.CHOSEN if getattr(hf_config, key, None)), 0
    )


def _fields(config: Config) -> dict[str, Any]:
    """The keys of config.json that determine shapes."""
    unread = ("architectures", "dtype", "model_type", "quantization_config", "torch_dtype")
    return {key: value for key, value in config.items() if key not in unread}


def only_values(values: Mapping[str, tuple[Any, ...]]) -> Check:
    """A check that keys have supported values."""

    def check(name: str, config: Config) -> None:
        for key, supported in values.items():
            if (value := config.get(key, supported[0])) not in supported:
                raise CheckpointError(
                    f"{key} is {value!r}; supported on {name} is "
                    f"{' or '.join(map(repr, supported))}."
                )

    return check
