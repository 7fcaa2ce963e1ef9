"""Keys of config.json that speak of how layers are connected, or of the residual stream.

Such a key often has no tensor of its own, so that a model which was trained with it would load as
the plain one and answer wrongly.
"""

import re

_CONNECTS = re.compile(
    r"(?<![a-z])depth(?!wise)|(cross|inter)_?layer|layer_(kv_)?reuse|kv_reuse|kv_shared|share_kv"
    r"|residual|(^|_)resid_|(^|_)hyper_?(conn|$|_)|(^|_)(hc|mhc|dwa|cla)_|(^|_)(mhc|dwa)$"
    r"|baseline_mode|dense_?(former|transformer|connect)|(skip|short|layer|block)_?connect"
    r"|highway|altup|laurel|yoco|recurrent_(model|depth)|(^|_)(num_)?loops?($|_)|ut_steps"
)
_INIT, _TRAINING = "how weights are drawn before training", "of training alone"
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
    "residual_in_fp32": "the type that the sum is kept in, not what is added to it",
}
# Keys that classes of these families read, so that they are served with them.
READ = {"residual_multiplier": ("granite", "granitemoe")}


def speaks_of_them(key: str) -> bool:
    """Whether a key, by its name, is about connections of layers and may change a model."""
    if key in HARMLESS or "dropout" in key:  # that is of training alone, wherever it is
        return False
    return _CONNECTS.search(key) is not None
