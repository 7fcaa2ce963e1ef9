"""Keys of config.json about connections of layers, or about the residual stream.

Such a key often has no tensors, so a model that was trained with it would load as the plain model
and answer wrongly.
"""

import re
from typing import Any

# A mere depth is a size: of a draft's tree, an encoder, a draft head.
_CONNECTS = re.compile(
    r"(^|_)depth_(?!first)|(mixture_of|recurrent|cross|dynamic|adaptive)_depths?"
    r"|(cross|inter)_?layer|layers?_?(kv_)?(reuse|shar(?!ed_exp))|shared_layers|kv_(reuse|shar)|shared?_kv"
    r"|residual|(^|_)resid_|(^|_)res_scal|(^|_)hyper_?(conn|$|_)|(^|_)(hc|mhc|dwa|cla)_"
    r"|(^|_)(mhc|dwa|cla)$|baseline_mode|dense_?(former|transformer|connect)"
    r"|(skip|short|layer|block)_?connect|highway|altup|laurel|yoco|(^|_)u_?net(_|$)"
    r"|deep_?norm|re_?zero(_|$)|(^|_)(num_)?(loops?|recurrences?)($|_)|recurrent_model|ut_steps"
)
# Keys for which 1 is neutral: factors, and numbers of things.
_ONE_IS_USUAL = re.compile(
    r"(scale|scaling|multiplier|factor|mult|loops?|recurrences?|steps|streams|inputs|rate)$"
)
_OFF = ("", "none", "null", "false", "off", "no", "standard", "vanilla", "plain", "default")
_INIT, _TRAINING = "initial weights", "training only"
_PRECISION = "the dtype of the sum, not its addends"
_MEASURED = "an output for analysis, not a change of the computation"
# Keys that leave a model as it is, and why.
HARMLESS = {
    "depth_init": _INIT,
    "depth_scaled_init": _INIT,
    "use_depth_scaled_init": _INIT,
    "rescale_prenorm_residual": _INIT,
    "resid_pdrop": _TRAINING,
    "stochastic_depth": _TRAINING,
    "stochastic_depth_prob": _TRAINING,
    "stochastic_depth_rate": _TRAINING,
    "residual_in_fp32": _PRECISION,
    "fp32_residual_connection": _PRECISION,
    "output_residuals": _MEASURED,
}


def speaks_of_them(key: str) -> bool:
    """Whether a key's name is about connections of layers, and the key may change a model."""
    name = _snake_case(key)
    if name in HARMLESS or "dropout" in name:  # training only, in any key
        return False
    return any(_CONNECTS.search(spelling) for spelling in (name, key.lower()))


def is_set(key: str, config: dict[str, Any]) -> bool:
    """Whether a key of ``config`` has an effect, and no other key switches it off."""
    value = config.get(key)
    if isinstance(value, str):
        says_something = value.strip().lower() not in _OFF
    elif type(value) in (int, float):
        usual = (0, 1) if _ONE_IS_USUAL.search(_snake_case(key)) else (0,)
        says_something = value not in usual
    else:
        says_something = bool(value)
    return says_something and not _is_switched_off(key, config)


def _is_switched_off(key: str, config: dict[str, Any]) -> bool:
    """Whether ``use_x`` is off beside ``x_y``."""
    for switch, value in config.items():
        what = re.fullmatch(r"(?:use|enable)_(\w+)", switch)
        if what and key.startswith(f"{what[1]}_") and (not value or value == "false"):
            return True
    return False


def _snake_case(key: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).replace("-", "_").lower()
