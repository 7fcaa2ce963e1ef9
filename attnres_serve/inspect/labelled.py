"""NumPy arrays over named axes, for xarray and pandas."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnres_serve.errors import SettingError

if TYPE_CHECKING:
    import pandas
    import xarray


class Array(NamedTuple):
    """An array and the names of its axes."""

    axes: tuple[str, ...]
    values: np.ndarray


class Label(NamedTuple):
    """Further labels of an axis, one for each of its places."""

    axis: str
    values: Sequence[Any] | np.ndarray


class Labelled:
    """Arrays that share named axes; ``labelled["weights"]`` is one of them.

    Attributes:
        title: of all of them, in a line.
        arrays: by name.
        axes: the labels of every axis, by its name.
        labels: further ones, by name.
        facts: of all of them, such as the model's name.
    """

    def __init__(
        self,
        title: str,
        arrays: Mapping[str, Array],
        axes: Mapping[str, Sequence[Any]],
        labels: Mapping[str, Label],
        facts: Mapping[str, Any],
    ) -> None:
        self.title, self.facts = title, dict(facts)
        self.arrays, self.axes, self.labels = dict(arrays), dict(axes), dict(labels)

    def __getitem__(self, name: str) -> np.ndarray:
        """The array of a name.

        Raises:
            KeyError: there is none.
        """
        if name not in self.arrays:
            raise KeyError(f"there is no array {name!r}; there are {', '.join(self.arrays)}")
        return self.arrays[name].values

    def __iter__(self) -> Iterator[str]:
        """The names of the arrays."""
        return iter(self.arrays)

    def __repr__(self) -> str:
        width = max(map(len, self.arrays))
        lines = [
            f"  {name:{width}}  ({', '.join(f'{axis}: {len(self.axes[axis])}' for axis in axes)})"
            for name, (axes, _) in self.arrays.items()
        ]
        return "\n".join([self.title, *lines])

    def to_xarray(self) -> "xarray.Dataset":
        """All arrays with their axes and labels.

        Raises:
            SettingError: xarray is not installed.
        """
        _require("xarray", "to_xarray")
        import xarray

        return xarray.Dataset(
            {name: (array.axes, array.values) for name, array in self.arrays.items()},
            {**self.axes, **self.labels},
            self.facts,
        )

    def to_pandas(self, name: str = "weights") -> "pandas.DataFrame":
        """A table with a row for each number of an array, and a column for each axis and label.

        Arrays over the same axes are further columns.  What does not exist, such as the weight of a
        source that a site does not have, has no row.

        Args:
            name: of the array.

        Raises:
            SettingError: pandas is not installed.
            KeyError: there is no such array.
        """
        _require("pandas", "to_pandas")
        import pandas

        shape, axes = self[name].shape, self.arrays[name].axes
        places = dict(zip(axes, np.indices(shape).reshape(len(axes), -1), strict=True))
        columns = {}
        for axis in axes:
            columns[axis] = _at(self.axes[axis], places[axis])
            for label, (of, values) in self.labels.items():
                if of == axis:
                    columns[label] = _at(values, places[axis])
        alike = {key: self[key].ravel() for key in self if self.arrays[key].axes == axes}
        table = pandas.DataFrame(columns | alike)
        return table.dropna(subset=list(alike), how="all", ignore_index=True)


def _at(labels: Sequence[Any] | np.ndarray, places: np.ndarray) -> list[Any]:
    return [labels[place] for place in places]


def _require(package: str, asking: str) -> None:
    if find_spec(package) is None:
        raise SettingError(
            f"{asking} needs {package}, which is not installed; install it, or attnres-serve with "
            "the extra python."
        )
