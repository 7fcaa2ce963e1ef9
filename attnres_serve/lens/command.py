"""``attnres-serve inspect``: flags, and the file they ask for."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve import output, sentences
from attnres_serve.errors import SettingError
from attnres_serve.lens.pictures import FIGURES, out_path

if TYPE_CHECKING:
    from tqdm import tqdm

    from attnres_serve.lens.ask import Server
    from attnres_serve.tracing.answer import TraceAnswer
    from attnres_serve.tracing.question import Question

OUT = "inspect.png"
TOP = 3  # most probable tokens that are named where there are edits


def _write_figure(trace: "TraceAnswer", token: int, path: Path, **width: float) -> None:
    from attnres_serve.lens import depth_map

    if not depth_map.has_all_sites(trace):
        found = sentences.some(site.index for site in trace.sites)
        raise SettingError(
            f"the trace has the sites {found}, and a figure needs all of them from 0 on; give "
            "--out FILE.html, or ask for the trace without `sites`."
        )
    depth_map.write(trace, token, path, **width)


def _write_json(trace: "TraceAnswer", token: int, path: Path) -> None:
    from attnres_serve.lens import files

    files.write(path, trace)


def _write_html(trace: "TraceAnswer", token: int, path: Path) -> None:
    from attnres_serve.lens import page

    path.write_text(page.html(trace.model_dump()), encoding="utf-8")


# From a suffix to what writes such a file: trace, position of the token that is shown, path.
WRITERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(FIGURES, _write_figure),
    ".html": _write_html,
    ".json": _write_json,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="what to look at; - reads it from stdin")
    parser.add_argument("--prompt-file", metavar="FILE", help="a file with the prompt")
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE.json",
        help="draw a trace or statistics of a file; or the statistics of the server at an address",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=0,
        metavar="N",
        help="greedy tokens of an answer, which are looked at as well (default: 0)",
    )
    parser.add_argument(
        "--edit",
        action="append",
        default=[],
        metavar="EDIT",
        help='change what sites read, for example \'mask sites=9,final sources="block 2" '
        "tokens=4:9'; may be given several times",
    )
    parser.add_argument(
        "--lens",
        type=int,
        metavar="K",
        help="the K most probable tokens by each mix and each sum of a block; for --out FILE.json",
    )
    parser.add_argument(
        "--importance",
        metavar="FILE",
        help="measure what the prompt, or --data, loses without each source of each site",
    )
    parser.add_argument(
        "--data", metavar="FILE.jsonl", help='texts of --importance, as {"text": ...} in each line'
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with an --importance that was interrupted"
    )
    parser.add_argument(
        "--prune", type=float, metavar="LOSS", help="choose masks that together cost less, in nats"
    )
    parser.add_argument(
        "--queries",
        action="store_true",
        help="look at what the sites have learned, without a prompt and a server; --out FILE.csv "
        "has the numbers",
    )
    parser.add_argument(
        "--token",
        type=int,
        metavar="POSITION",
        help="the token that is shown beside the mean, counted from 0 (default: the last one)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"{', '.join(WRITERS)}: a figure, a page of every token that needs no server, or the "
        f"numbers as the server's route answers them (default: {OUT})",
    )
    parser.add_argument(
        "--width", type=float, metavar="INCHES", help="of the figure, such as 3.25 for a column"
    )
    parser.add_argument("--url", metavar="URL", help="ask the server there instead of starting one")
    parser.add_argument(
        "--max-model-len",
        "--max_model_len",  # which vLLM takes as well
        type=int,
        metavar="N",
        help="longest sequence of the server that is started (default: the model's)",
    )


def run(checkpoint: str | None, own: argparse.Namespace, flags: list[str]) -> int:
    """Trace a prompt and write what the command line asks for.

    Args:
        checkpoint: folder or Hugging Face model id; None with ``--url`` and ``--from``.
        own: what ``add_arguments`` defines.
        flags: any other, which are those of a server that is started.

    Raises:
        CheckpointError, SettingError: with one sentence.
    """
    _check_values(checkpoint, own)
    if own.queries:
        _require_only(("queries", "out", "width"), own)
        from attnres_serve.lens import show

        return show.queries(checkpoint, own.out or OUT, own.width, flags)
    if own.importance is not None:
        return _measure(checkpoint, own, flags)
    if own.data is not None or own.resume or own.prune is not None:
        raise SettingError("--data, --resume and --prune are for --importance; give that too.")
    path = out_path(own.out or OUT, WRITERS, own.width)
    write = WRITERS[path.suffix.lower()]
    _check(checkpoint, own, flags)
    if own.source is not None:
        from attnres_serve.lens import statistics

        if statistics.drew(own.source, path, own.width):
            return 0
    if own.width is not None:
        write = partial(write, width=own.width)
    with output.bar(total=3, unit="step") as bar:
        if own.source is None:
            from attnres_serve.lens import ask

            with _server(checkpoint, own, flags, bar) as server:
                bar.set_description("asking the server")
                trace = ask.ask(server, own.prompt, _question(own))
        else:
            from attnres_serve.lens import given

            trace = given.trace(own.source)
        positions = [one.position for one in trace.tokens]
        token = positions[-1] if own.token is None else own.token
        _check_token(token, positions)
        bar.set_description("writing")
        try:
            write(trace, token, path)
        except OSError as error:
            raise SettingError(f"{path} cannot be written ({error}).") from None
        bar.update()
    if trace.logprobs is not None:
        from attnres_serve.lens import words

        print(words.of_logprobs(trace, token), file=output.out())
    print(path, file=output.out())
    return 0


def _given(own: argparse.Namespace) -> dict[str, str]:
    """The flags of ours that have another value than without them, by their names in ``own``."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return {
        action.dest: action.option_strings[0]
        for action in parser._actions
        if getattr(own, action.dest) != action.default
    }


def _check_values(checkpoint: str | None, own: argparse.Namespace) -> None:
    """Refuse values that mean nothing in any mode."""
    given = {flag: getattr(own, name) for name, flag in _given(own).items()}
    for flag, value in {"the checkpoint": checkpoint, **given}.items():
        if value == "":  # as an unset variable of a shell leaves it
            raise SettingError(f"{flag} is empty; give it a value, or leave it out.")
    for flag, least in (
        *(("--max-tokens", 0), ("--lens", 0), ("--token", 0)),
        ("--max-model-len", 1),
    ):
        if given.get(flag, least) < least:
            raise SettingError(f"{flag} is {given[flag]}; expected {least} or more.")


def _check(checkpoint: str | None, own: argparse.Namespace, flags: list[str]) -> None:
    """Refuse what can be seen on the command line alone, of a trace or an importance map."""
    if [checkpoint, own.url, own.source].count(None) != 2:
        raise SettingError(
            "give a checkpoint right after `inspect`, --url URL of a server, or --from FILE.json, "
            "one of them."
        )
    if own.source is not None:
        drawn = ("source", "token", "out", "width")
        words = [flag for name, flag in _given(own).items() if name not in drawn] + flags
        if words:
            raise SettingError(f"{words[0]} is for a new trace; with --from there is one already.")
    elif own.data is None:
        from attnres_serve.lens import given

        own.prompt = given.prompt(own.prompt, own.prompt_file)
        own.edits = given.edits(own.edit, own.max_tokens)
    suffix = Path(own.out or OUT).suffix.lower()
    if own.lens is not None and suffix != ".json":
        raise SettingError(f"--lens has its place in a .json file; --out is {own.out or OUT}.")
    is_figure = WRITERS.get(suffix) is _write_figure
    is_shown = is_figure or own.edit
    if own.token is not None and not is_shown:
        raise SettingError(
            "--token chooses what a figure shows, and with --edit the token behind which the most "
            f"probable ones are told; a {suffix} file has every token."
        )
    words = _flags(own, flags)
    if own.url is not None and words:
        name = words[0].partition("=")[0]
        raise SettingError(
            f"{name} is for a server that is started; the one at --url runs already."
        )


def _flags(own: argparse.Namespace, flags: list[str]) -> list[str]:
    """Those of a server that is started."""
    longest = own.max_model_len
    return [*flags, *([] if longest is None else [f"--max-model-len={longest}"])]


def _check_token(token: int, positions: Sequence[int]) -> None:
    if token not in positions:
        raise SettingError(
            f"--token is {token}; expected one of the {len(positions)} tokens that are traced, at "
            f"the positions {positions[0]} to {positions[-1]}."
        )


@contextmanager
def _server(
    checkpoint: str | None, own: argparse.Namespace, flags: list[str], bar: "tqdm"
) -> Iterator["Server"]:
    """The server of ``--url``, or one that is started for the time of the context."""
    from attnres_serve.lens import own_server
    from attnres_serve.lens.ask import Server

    if checkpoint is None:
        yield Server(own.url)
        return
    words = _flags(own, flags)
    show = bar.set_description
    with own_server.running(checkpoint, words, output.is_verbose(), show) as server:
        bar.update()
        yield server


def _question(own: argparse.Namespace) -> "Question":
    from attnres_serve.tracing.question import Question

    fields = {"max_tokens": own.max_tokens, "edits": own.edits, "lens": own.lens}
    return Question.model_validate(fields | ({"logprobs": TOP} if own.edits else {}))


def _require_only(names: Sequence[str], own: argparse.Namespace) -> None:
    """Refuse any flag of ours beside those that a mode knows.

    Args:
        names: of the flag that asks for the mode, and of those that it knows.
        own: as of ``run``.
    """
    for name, flag in _given(own).items():
        if name not in names:
            mode = f"--{names[0].replace('_', '-')}"
            raise SettingError(f"{flag} does not go with {mode}.")


def _measure(checkpoint: str | None, own: argparse.Namespace, flags: list[str]) -> int:
    """Write an importance map."""
    mode = ("data", "importance") if own.data else ("importance", "prompt", "prompt_file")
    _require_only((*mode, "resume", "prune", "url", "max_model_len", "width"), own)
    from attnres_serve.lens import given, importance, losses

    path = out_path(own.importance, importance.SUFFIXES, own.width, "--importance")
    if not own.resume and (path.exists() or importance.losses_of(path).exists()):
        raise SettingError(
            f"--importance: {path} or its losses exist already; name a new file, or give --resume."
        )
    _check(checkpoint, own, flags)
    texts = [own.prompt] if own.data is None else given.data(own.data)
    if own.prune is not None and len(texts) < importance.FEWEST:
        raise SettingError(f"--prune needs {importance.FEWEST} texts; give more by --data.")
    flags = ["--enable-attnres-edits", f"--max-num-seqs={losses.BATCH}", *flags]
    with output.bar(total=2, unit="step") as bar, _server(checkpoint, own, flags, bar) as server:
        for line in importance.measure(server, texts, path, own.prune, own.width):
            print(line, file=output.out())
    return 0
