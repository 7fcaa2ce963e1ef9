"""The vectors of a trace in Python: as datasets, and as values of an edit."""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from attnres_serve.errors import SettingError
from attnres_serve.tracing.answer import TraceAnswer

if TYPE_CHECKING:
    import xarray

Tensors = dict[str, np.ndarray]  # by their names in a response


def datasets(answer: TraceAnswer, tensors: Tensors) -> dict[int, "xarray.Dataset"]:
    """The vectors of a trace, by site; empty without vectors."""
    import xarray

    by_site: dict[int, xarray.Dataset] = {}
    tokens = [token.position for token in answer.tokens]
    for site in answer.sites if tensors else ():
        variables = {"token": tokens, "source": site.sources}
        for part in ("sources", "mix", "output"):
            if (array := tensors.get(f"site.{site.index}.{part}")) is not None:
                axes = ("token", *["source"] * (part == "sources"), "hidden")
                variables[part] = (axes, array)
        by_site[site.index] = xarray.Dataset(variables)
    return by_site


def encoded(values: Any, name: str) -> str:
    """Vectors ``[d]`` or ``[T, d]`` in the base64 of a request.

    Raises:
        SettingError: they are no array of numbers.
    """
    try:
        with np.errstate(over="ignore"):  # the server refuses infinity
            array = np.asarray(values).astype("<f4", casting="same_kind")
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"{name}: found {type(values).__name__} ({error}); expected an array of float32."
        ) from None
    return base64.b64encode(array.tobytes()).decode()
