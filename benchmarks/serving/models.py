"""A model that is measured, with dummy weights, and its standard-residual baseline."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attnres_serve.bench.baseline import write_baseline
from attnres_serve.checkpoints.checked import check_model
from attnres_serve.formats.parsed_config import ParsedConfig
from benchmarks.serving.shapes import LONGEST, Shape


def flags(step: int = LONGEST) -> tuple[str, ...]:
    """Flags of an engine; ``step``: the most tokens that it computes together, which it tries."""
    return (
        "--load-format=dummy",
        "--dtype=bfloat16",
        f"--max-model-len={LONGEST}",
        f"--max-num-batched-tokens={step}",
        "--max-num-seqs=8",
    )


FLAGS = flags()


@contextmanager
def models(shape: Shape) -> Iterator[tuple[Path, Path, ParsedConfig]]:
    """Folders of a model and of its standard-residual baseline, and the parsed config."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, baseline = Path(scratch) / "model", Path(scratch) / "baseline"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(shape.config()))
        checked = check_model(str(folder), has_weights=False)
        write_baseline(folder, checked, baseline)
        yield folder, baseline, checked.translated(str(folder))
