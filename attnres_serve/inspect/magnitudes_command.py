"""``attnres-serve inspect --magnitudes``: how large outputs and mixes are, in one model or two."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnres_serve import output
from attnres_serve.errors import SettingError
from attnres_serve.inspect import given, numbers, prepare
from attnres_serve.inspect.prepare import Prepared
from attnres_serve.inspect.rows import rows_of

Measured = dict[int, tuple[np.ndarray, np.ndarray]]  # as of ``magnitudes.measure``


def run(checkpoint: str | None, own: argparse.Namespace, flags: list[str]) -> int:
    """Draw how large outputs and mixes of a prompt are, and write it as numbers.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.  ``--against``
            is another, which may have standard residuals: its mix is the residual stream.
        own: the flags of ours.
        flags: of vLLM's engine, or of both.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError(
            "--magnitudes starts an engine; give a checkpoint right after `inspect`."
        )
    paths = numbers.outputs(own.numbers, own.out)
    own.prompt = given.prompt(own.prompt, own.prompt_file)
    names = [prepare.name_of(checkpoint, flags)]
    asked = [prepare.prepared(checkpoint, own.prompt, 0, flags, own.max_model_len)]
    from attnres_serve.inspect import magnitudes as sizes

    if own.against is not None:
        if own.against == checkpoint:
            raise SettingError("both sides are the same; name another checkpoint.")
        names.append(own.against)
        asked.append(prepare.prepared(own.against, own.prompt, 0, flags, own.max_model_len, True))
        sizes.require_same((checkpoint, own.against), (asked[0].layout, asked[1].layout))
    rows = rows_of(asked[0].sites)
    found = [sizes.summary(rows, measured) for measured in _measured(asked, flags)]

    def draw(path: Path) -> None:
        from attnres_serve.inspect import magnitudes_figure

        sides = [
            magnitudes_figure.Side(name, len(one.given), values)
            for name, one, values in zip(names, asked, found, strict=True)
        ]
        magnitudes_figure.write(sides, path)

    numbers.write(paths, draw, sizes.table(*found), sizes.arrays(*found))
    return 0


def _measured(asked: list[Prepared], flags: list[str]) -> Iterator[Measured]:
    """What the engines of some checkpoints measure, one after the other.

    Raises:
        SettingError: vLLM refuses the flags, or cannot be measured with them.
    """
    from attnres_serve.inspect import ask

    with output.bar(total=len(asked), unit="step") as bar:
        for one in asked:
            words = [*one.flags, "--max-num-seqs=1", *flags]
            norms = None if one.sites else one.layout.norms
            with ask.engine_of(words, bar) as engine:
                bar.set_description("measuring")
                workers = engine.collective_rpc("attn_res_magnitudes", args=(one.given, norms))
                bar.update()
            ask.raise_first([worker["problem"] for worker in workers])
            yield {
                index: (np.frombuffer(received, np.float32), np.frombuffer(mixed, np.float32))
                for worker in workers
                for index, received, mixed in worker["sites"]
            }
