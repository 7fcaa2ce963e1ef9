"""``attnres-serve inspect --queries``: what the sites of a checkpoint have learned."""

from functools import partial
from pathlib import Path

import numpy as np

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.kernels.interface import MASKED
from attnres_serve.lens.pictures import FIGURES, out_path
from attnres_serve.tracing import queries as learned

TABLE = ".csv"


def queries(checkpoint: str | None, out: str, width: float | None, flags: list[str]) -> int:
    """Draw what the sites of a checkpoint have learned, or write it as a table.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        out: ``--out``.
        width: ``--width``.
        flags: of a server, of which there must be none.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError("--queries reads a checkpoint; give it right after `inspect`.")
    if flags:
        raise SettingError(f"{flags[0]} is for a server; --queries starts none.")
    path = out_path(out, (*FIGURES, TABLE), width)
    found = learned.read(checkpoint)
    try:
        if path.suffix.lower() == TABLE:
            _write_table(found, path)
        else:
            _draw(checkpoint, found, path, width)
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error}).") from None
    print(path, file=output.out())
    return 0


def _write_table(found: learned.Queries, path: Path) -> None:
    """A row for each site, and its cosines to all of them; the final one has no layer."""
    import pandas

    table = pandas.DataFrame(
        {
            "site": [site.index for site in found.sites],
            "layer": pandas.array([site.layer for site in found.sites], "Int64"),
            "kind": [site.kind for site in found.sites],
            "query": found.query,
            "key_norm": found.key_norm,
            "effective": found.effective,
        }
    )
    for column in range(max(map(len, found.biases), default=0)):  # NaN behind the last source
        own = [bias[column] if column < len(bias) else np.nan for bias in found.biases]
        table[f"bias {column}"] = own
    names = [f"cosine {site.index}" for site in found.sites]
    table = table.join(pandas.DataFrame(found.cosine, columns=names))
    # Nine digits tell any two float32 numbers apart.
    table.to_csv(path, index=False, float_format="%.9g", lineterminator="\n")


def _draw(checkpoint: str, found: learned.Queries, path: Path, width: float | None) -> None:
    from attnres_serve.lens import figure

    sizes = {
        "length of the\neffective query": found.effective,
        "rms of the\nkey norm": found.key_norm,
    }
    if found.biases:
        last = np.array([bias[-1] for bias in found.biases])
        sizes["bias of the\nlast source"] = np.where(last > MASKED, last, np.nan)
    title = f"{Path(checkpoint).name or checkpoint}: what the sites have learned"
    drawn = partial(figure.queries, title, found.sites, found.cosine, sizes)
    figure.write(path, drawn, width or figure.WIDTH)
