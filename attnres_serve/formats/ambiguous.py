"""Formats that write the same config.json, told apart by the names of tensors."""

from collections.abc import Collection
from typing import Any

from attnres_serve import formats
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.parsed_config import ParsedConfig


def distinguished(
    candidates: list[ParsedConfig], config: dict[str, Any], names: Collection[str] | None
) -> ParsedConfig:
    """The candidate whose format the tensor names show, of several with the same config.json.

    Without tensors, a key decides that only one of the formats writes.
    """
    possible = [formats.by_name(parsed.format) for parsed in candidates]
    if names is None:
        where, marks = "config.json", {}
        for one in possible:
            if one.distinct_key in config:
                marks[one.name] = str(one.distinct_key)
    else:
        where = "the checkpoint"
        marks = {
            one.name: name
            for one in possible
            for name in sorted(names, reverse=True)
            if one.mark is not None and one.mark.search(name)
        }
    if len(marks) == 1:
        return next(parsed for parsed in candidates if parsed.format in marks)
    meanings = " or ".join(one.name for one in possible)
    seen = " and ".join(f"{mark} (of {name} only)" for name, mark in marks.items())
    raise CheckpointError(
        f"model_type {config.get('model_type')!r} stands for {meanings}, and {where} has "
        + (f"both {seen}" if marks else "nothing that only one of them has")
        + ": no published code defines such a model, so it is not supported"
        + ("; its tensors would tell more, but they are not at hand." if names is None else ".")
    )
