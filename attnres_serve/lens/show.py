"""``attnres-serve inspect --queries``: the queries and key norms of a checkpoint's sites."""

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
    """Draw the queries and key norms of a checkpoint's sites, or write them as a table.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        out: the value of ``--out``.
        width: the value of ``--width``.
        flags: flags of a server, which are refused.

    Raises:
        CheckpointError, SettingError: the message is one sentence.
    """
    if checkpoint is None:
        raise SettingError("--queries reads a checkpoint; give it right after `inspect`.")
    if flags:
        raise SettingError(f"{flags[0]} is for a server; --queries starts none.")
    path = out_path(out, (*FIGURES, TABLE), width)
    parameters = learned.read(checkpoint)
    try:
        if path.suffix.lower() == TABLE:
            _write_table(parameters, path)
        else:
            _draw(checkpoint, parameters, path, width)
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error}).") from None
    print(path, file=output.out())
    return 0


def _write_table(parameters: learned.Queries, path: Path) -> None:
    """Write a row for each site, with its cosines to all sites; the final site has no layer."""
    import pandas

    table = pandas.DataFrame(
        {
            "site": [site.index for site in parameters.sites],
            "layer": pandas.array([site.layer for site in parameters.sites], "Int64"),
            "kind": [site.kind for site in parameters.sites],
            "query": parameters.query,
            "key_norm": parameters.key_norm,
            "effective": parameters.effective,
        }
    )
    for column in range(max(map(len, parameters.biases), default=0)):  # NaN after the last source
        biases = [bias[column] if column < len(bias) else np.nan for bias in parameters.biases]
        table[f"bias {column}"] = biases
    names = [f"cosine {site.index}" for site in parameters.sites]
    table = table.join(pandas.DataFrame(parameters.cosine, columns=names))
    # Nine digits distinguish any two float32 numbers.
    table.to_csv(path, index=False, float_format="%.9g", lineterminator="\n")


def _draw(checkpoint: str, parameters: learned.Queries, path: Path, width: float | None) -> None:
    from attnres_serve.lens import figure

    sizes = {
        "length of the\neffective query": parameters.effective,
        "rms of the\nkey norm": parameters.key_norm,
    }
    if parameters.biases:
        last = np.array([bias[-1] for bias in parameters.biases])
        sizes["bias of the\nlast source"] = np.where(last > MASKED, last, np.nan)
    title = f"{Path(checkpoint).name or checkpoint}: what the sites have learned"
    drawn = partial(figure.queries, title, parameters.sites, parameters.cosine, sizes)
    figure.write(path, drawn, width or figure.WIDTH)
