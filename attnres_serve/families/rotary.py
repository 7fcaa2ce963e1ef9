"""Rotary embeddings that vLLM computes as Hugging Face's classes do."""

from attnres_serve.depth.spec import is_count, is_number
from attnres_serve.errors import CheckpointError
from attnres_serve.families.family import Check, Config

# The keys that each supported type needs besides rope_theta.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Defaults of both Hugging Face's classes and vLLM.
PART = "partial_rotary_factor"
TRUNCATE = "truncate"  # of yarn: whether to round its range of frequencies
ROPE_DEFAULTS = {PART: 1, "beta_fast": 32, "beta_slow": 1, TRUNCATE: True}
FREQ_FACTORS = (("low", 1), ("high", 2))  # assumed for types without them


def part(family: str, config: Config) -> None:
    """Raise CheckpointError unless the rotated part of a head is in (0, 1]."""
    for place in (config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}):
        rotated = place.get(PART)
        if rotated is not None and (not is_number(rotated) or not 0 < rotated <= 1):
            raise CheckpointError(f"{PART} is {rotated!r}; expected a number above 0, 1 at most.")


def check(family: str, config: Config, also: tuple[str, ...] = ()) -> None:
    """Raise CheckpointError for a rotary embedding that vLLM and Hugging Face compute differently.

    Either key may state it; rope_scaling takes precedence.

    Args:
        family: its name.
        config: its config.json.
        also: further supported keys, for every type.
    """
    theta = config.get("rope_theta")
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key)
    if rope is None:
        rope = {}
    if not isinstance(rope, dict):
        raise CheckpointError(
            f"{key} is {rope!r}; expected an object such as {{'rope_type': 'default'}}."
        )
    kind, other = (rope.get(name) for name in ("rope_type", "type"))
    kind = kind if kind is not None else "default" if other is None else other
    needed = ROPE_TYPES.get(kind) if isinstance(kind, str) else None
    if needed is None or other not in (None, kind):
        raise CheckpointError(
            f"{key} is {rope!r}: a rotary embedding of this type is not supported; supported are "
            f"{', '.join(ROPE_TYPES)}."
        )
    if kind == "yarn" and type(rope.get(TRUNCATE)) is bool:
        rope = {name: value for name, value in rope.items() if name != TRUNCATE}
    usual = ROPE_DEFAULTS | ({"factor": 1} if kind == "default" else {})
    values = {
        name: value
        for name, value in rope.items()
        if name not in ("rope_type", "type") and value not in (None, usual.get(name))
    }
    for name in sorted({*needed, *values}):
        if name not in (*needed, *also, "rope_theta") or name not in values:
            raise CheckpointError(
                f"{key} is {rope!r}: "
                + (f"it lacks {name}" if name in needed else f"{name} is not supported")
                + f"; the type {kind!r} has rope_theta{''.join(f', {n}' for n in needed)}."
            )
    if kind != "default" and {**config, **rope}.get("rope_theta", 1) is None:
        raise CheckpointError("rope_theta is None; give a positive number or remove the key.")
    for name, value in (*values.items(), ("rope_theta", 1 if theta is None else theta)):
        if not is_number(value) or value <= 0:
            raise CheckpointError(f"{name} is {value!r}; expected a positive number.")
        if name == "original_max_position_embeddings" and not is_count(value):
            raise CheckpointError(f"{name} is {value!r}; expected a whole number of tokens.")
    low, high = (values.get(f"{name}_freq_factor", default) for name, default in FREQ_FACTORS)
    if low >= high:
        raise CheckpointError(
            f"low_freq_factor is {low!r} and high_freq_factor {high!r}; expected the first to be "
            "smaller."
        )


def by_kinds(*kinds: str) -> Check:
    """A check for families with one rotary embedding for each kind of layer.

    ``rope_parameters`` is then an object by kind. Older files have ``rope_scaling`` and
    ``rope_theta`` for the layers with full attention.
    """

    def check_kinds(family: str, config: Config) -> None:
        ropes = config.get("rope_parameters")
        ropes = {} if ropes is None else ropes
        if not isinstance(ropes, dict) or set(ropes) - set(kinds):
            raise CheckpointError(
                f"rope_parameters is {ropes!r}; expected an object for each of "
                f"{' and '.join(kinds)}, by these names."
            )
        if ropes and config.get("rope_scaling"):
            raise CheckpointError(
                "config.json has rope_parameters and rope_scaling; leave out rope_scaling, the "
                "older of the two."
            )
        for rope in ropes.values():
            check(family, {"rope_parameters": rope})
        older = {key: config[key] for key in ("rope_scaling", "rope_theta") if key in config}
        check(family, older)

    return check_kinds
