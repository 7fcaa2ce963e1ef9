"""Serve Attention Residuals models with vLLM, trace them in Python, and send them weights."""

TYPE_CHECKING = False  # like typing's, whose import takes milliseconds
if TYPE_CHECKING:
    from attnres_serve.lens.api import trace as trace
    from attnres_serve.lens.statistics import statistics as statistics
    from attnres_serve.lens.traced import Trace as Trace
    from attnres_serve.logprobs import compare_logprobs as compare_logprobs
    from attnres_serve.verify.reference_model import reference_model as reference_model
    from attnres_serve.weight_sender import WeightSender as WeightSender

__version__ = "0.1.0"

# Imported at first use, because these import NumPy.
_MODULES = {
    "Trace": "attnres_serve.lens.traced",
    "WeightSender": "attnres_serve.weight_sender",
    "compare_logprobs": "attnres_serve.logprobs",
    "reference_model": "attnres_serve.verify.reference_model",
    "statistics": "attnres_serve.lens.statistics",
    "trace": "attnres_serve.lens.api",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
