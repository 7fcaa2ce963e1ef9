"""What ``attnres-serve inspect`` shows beside traces: learned queries, whole texts, magnitudes."""

import argparse
from pathlib import Path

import numpy as np

from attnres_serve.checkpoints import hub
from attnres_serve.errors import SettingError
from attnres_serve.inspect import given, numbers, prepare
from attnres_serve.inspect import queries as learned
from attnres_serve.inspect.pieces import parts_of_file
from attnres_serve.inspect.rows import rows_of


def queries(checkpoint: str | None, table: str | None, out: str | None, flags: list[str]) -> int:
    """Draw what the sites of a checkpoint have learned, and write it as numbers.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        table: ``--numbers``.
        out: ``--out``.
        flags: of an engine, of which there must be none.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError("--queries reads a checkpoint; give it right after `inspect`.")
    if flags:
        raise SettingError(f"{flags[0]} is for an engine; --queries starts none.")
    paths = numbers.outputs(table, out)
    found = learned.read(checkpoint, hub.on_this_machine(checkpoint))

    def draw(path: Path) -> None:
        from attnres_serve.inspect import queries_figure

        queries_figure.write(checkpoint, found, path)

    numbers.write(paths, draw, learned.table(found), learned.arrays(found))
    return 0


def whole_text(checkpoint: str | None, own: argparse.Namespace, flags: list[str]) -> int:
    """Draw the depth weights over a text, and write them as numbers.

    Args:
        checkpoint: folder, or a model id whose files are in the Hugging Face cache.
        own: the flags of ours.
        flags: of vLLM's engine.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError("--text starts an engine; give a checkpoint right after `inspect`.")
    paths = numbers.outputs(own.numbers, own.out)
    from attnres_serve.inspect import statistics, text

    model = prepare.opened(checkpoint, own.max_model_len, flags)
    pieces = text.pieces_of(model, parts_of_file("--text", own.text))
    (found,) = text.summaries(prepare.name_of(checkpoint, flags), model, [pieces], flags)

    def draw(path: Path) -> None:
        from attnres_serve.inspect import text_figure

        text_figure.write(found, path)

    numbers.write(paths, draw, statistics.table(found), statistics.arrays(found))
    return 0


def magnitudes(checkpoint: str | None, own: argparse.Namespace, flags: list[str]) -> int:
    """Draw how large outputs and mixes of a prompt are, and write it as numbers.

    Args:
        checkpoint: as of ``whole_text``.
        own: the flags of ours.
        flags: of vLLM's engine.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    if checkpoint is None:
        raise SettingError(
            "--magnitudes starts an engine; give a checkpoint right after `inspect`."
        )
    paths = numbers.outputs(own.numbers, own.out)
    own.prompt = given.prompt(own.prompt, own.prompt_file)
    asked = prepare.prepared(checkpoint, own.prompt, 0, flags, own.max_model_len)
    words = [*asked.flags, "--max-num-seqs=1", *flags]
    from tqdm import tqdm

    from attnres_serve.inspect import ask
    from attnres_serve.inspect import magnitudes as sizes

    with tqdm(total=1, unit="step") as bar, ask.engine_of(words, bar) as engine:
        bar.set_description("measuring")
        workers = engine.collective_rpc("attn_res_magnitudes", args=(asked.given,))
        bar.update()
    ask.raise_first([worker["problem"] for worker in workers])
    measured = {
        index: (np.frombuffer(received, np.float32), np.frombuffer(mixed, np.float32))
        for worker in workers
        for index, received, mixed in worker["sites"]
    }
    found = sizes.summary(rows_of(asked.sites), measured)

    def draw(path: Path) -> None:
        from attnres_serve.inspect import magnitudes_figure

        magnitudes_figure.write(prepare.name_of(checkpoint, flags), len(asked.given), found, path)

    numbers.write(paths, draw, sizes.table(found), sizes.arrays(found))
    return 0
