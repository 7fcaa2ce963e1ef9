"""``attnres-serve inspect``: its flags, and the file that it writes."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attnres_serve import output, sentences, settings
from attnres_serve.errors import SettingError
from attnres_serve.lens.pictures import FIGURES, out_path

if TYPE_CHECKING:
    from tqdm import tqdm

    from attnres_serve.lens.ask import Server
    from attnres_serve.tracing.answer import TraceAnswer
    from attnres_serve.tracing.options import TraceOptions

OUT = "inspect.png"
TOP = 3  # number of the most probable tokens that are printed with edits


def _write_figure(trace: "TraceAnswer", token: int, path: Path, **width: float) -> None:
    from attnres_serve.lens import depth_map

    if not depth_map.has_all_sites(trace):
        shown_sites = sentences.some(site.index for site in trace.sites)
        raise SettingError(
            f"the trace has the sites {shown_sites}, and a figure needs all of them from 0 on; "
            "give --out FILE.html, or ask for the trace without `sites`."
        )
    depth_map.write(trace, token, path, **width)


def _write_json(trace: "TraceAnswer", token: int, path: Path) -> None:
    from attnres_serve.lens import files

    files.write(path, trace)


def _write_html(trace: "TraceAnswer", token: int, path: Path) -> None:
    from attnres_serve.lens import page

    path.write_text(page.html(trace.model_dump()), encoding="utf-8")


# Writers by suffix; their arguments are the trace, the position of the shown token and the path.
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
    example = 'mask sites=9,final sources="block 2" tokens=4:9'
    settings.add_edits(parser, "edit", "change what sites read", example)
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


def run(checkpoint: str | None, options: argparse.Namespace, flags: list[str]) -> int:
    """Trace a prompt and write the requested file.

    Args:
        checkpoint: folder or Hugging Face model id; None with ``--url`` and ``--from``.
        options: the flags of ``add_arguments``.
        flags: all other flags, which go to a temporary server.

    Raises:
        CheckpointError, SettingError: the message is one sentence.
    """
    _check_values(checkpoint, options)
    if options.queries:
        _require_only(("queries", "out", "width"), options)
        from attnres_serve.lens import show

        return show.queries(checkpoint, options.out or OUT, options.width, flags)
    if options.importance is not None:
        return _measure(checkpoint, options, flags)
    if options.data is not None or options.resume or options.prune is not None:
        raise SettingError("--data, --resume and --prune are for --importance; give that too.")
    path = out_path(options.out or OUT, WRITERS, options.width)
    write = WRITERS[path.suffix.lower()]
    _check(checkpoint, options, flags)
    if options.source is not None:
        from attnres_serve.lens import statistics

        if statistics.drew(options.source, path, options.width):
            return 0
    if options.width is not None:
        write = partial(write, width=options.width)
    with output.bar(total=3, unit="step") as bar:
        if options.source is None:
            from attnres_serve.lens import ask

            with _server(checkpoint, options, flags, bar) as server:
                bar.set_description("asking the server")
                trace = ask.ask(server, options.prompt, _trace_options(options))
        else:
            from attnres_serve.lens import files

            trace = files.read(Path(options.source), "--from")
            if not trace.sites or not trace.tokens:
                raise SettingError(
                    f"--from: {options.source} has no tokens or no sites: there is nothing to draw."
                )
        positions = [one.position for one in trace.tokens]
        token = positions[-1] if options.token is None else options.token
        _check_token(token, positions)
        bar.set_description("writing")
        try:
            write(trace, token, path)
        except OSError as error:
            raise SettingError(f"{path} cannot be written ({error}).") from None
        bar.update()
    if trace.logprobs is not None:
        from attnres_serve.lens import edit_effect

        print(edit_effect.lines(trace, token), file=output.out())
    print(path, file=output.out())
    return 0


def _changed_flags(options: argparse.Namespace) -> dict[str, str]:
    """The flags of ``add_arguments`` with values other than the defaults, by attribute."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return {
        action.dest: action.option_strings[0]
        for action in parser._actions
        if getattr(options, action.dest) != action.default
    }


def _check_values(checkpoint: str | None, options: argparse.Namespace) -> None:
    """Refuse values that are invalid in every mode."""
    values = {flag: getattr(options, name) for name, flag in _changed_flags(options).items()}
    for flag, value in {"the checkpoint": checkpoint, **values}.items():
        if value == "":  # as from an unset variable of a shell
            raise SettingError(f"{flag} is empty; give it a value, or leave it out.")
    for flag, least in (
        *(("--max-tokens", 0), ("--lens", 0), ("--token", 0)),
        ("--max-model-len", 1),
    ):
        if values.get(flag, least) < least:
            raise SettingError(f"{flag} is {values[flag]}; expected {least} or more.")


def _check(checkpoint: str | None, options: argparse.Namespace, flags: list[str]) -> None:
    """Refuse invalid flags of a trace or an importance map before anything is started."""
    if [checkpoint, options.url, options.source].count(None) != 2:
        raise SettingError(
            "give a checkpoint right after `inspect`, --url URL of a server, or --from FILE.json, "
            "one of them."
        )
    if options.source is not None:
        of_drawing = ("source", "token", "out", "width")
        others = [
            flag for name, flag in _changed_flags(options).items() if name not in of_drawing
        ] + flags
        if others:
            raise SettingError(f"{others[0]} is for a new trace; with --from there is one already.")
    elif options.data is None:
        from attnres_serve.depth import edit_text, resolved_edits
        from attnres_serve.lens import inputs

        options.prompt = inputs.prompt(options.prompt, options.prompt_file)
        options.edits = edit_text.each(options.edit)
        if options.edits:
            resolved_edits.require_few_tokens(options.max_tokens, "--max-tokens", "--edit")
    suffix = Path(options.out or OUT).suffix.lower()
    if options.lens is not None and suffix != ".json":
        raise SettingError(f"--lens has its place in a .json file; --out is {options.out or OUT}.")
    is_figure = WRITERS.get(suffix) is _write_figure
    is_shown = is_figure or options.edit
    if options.token is not None and not is_shown:
        raise SettingError(
            "--token chooses what a figure shows, and with --edit the token behind which the most "
            f"probable ones are told; a {suffix} file has every token."
        )
    server_flags = _flags(options, flags)
    if options.url is not None and server_flags:
        name = server_flags[0].partition("=")[0]
        raise SettingError(
            f"{name} is for a server that is started; the one at --url runs already."
        )


def _flags(options: argparse.Namespace, flags: list[str]) -> list[str]:
    """The flags of a temporary server."""
    longest = options.max_model_len
    return [*flags, *([] if longest is None else [f"--max-model-len={longest}"])]


def _check_token(token: int, positions: Sequence[int]) -> None:
    if token not in positions:
        raise SettingError(
            f"--token is {token}; expected one of the {len(positions)} tokens that are traced, at "
            f"the positions {positions[0]} to {positions[-1]}."
        )


@contextmanager
def _server(
    checkpoint: str | None, options: argparse.Namespace, flags: list[str], bar: "tqdm"
) -> Iterator["Server"]:
    """The server of ``--url``, or a temporary one."""
    from attnres_serve.lens import temporary_server
    from attnres_serve.lens.ask import Server

    if checkpoint is None:
        yield Server(options.url)
        return
    server_flags = _flags(options, flags)
    with temporary_server.running(
        checkpoint, server_flags, output.is_verbose(), bar.set_description
    ) as server:
        bar.update()
        yield server


def _trace_options(options: argparse.Namespace) -> "TraceOptions":
    from attnres_serve.tracing.options import TraceOptions

    fields = {"max_tokens": options.max_tokens, "edits": options.edits, "lens": options.lens}
    return TraceOptions.model_validate(fields | ({"logprobs": TOP} if options.edits else {}))


def _require_only(names: Sequence[str], options: argparse.Namespace) -> None:
    """Refuse flags that a mode does not accept.

    Args:
        names: attributes of the flag that selects the mode, and of the flags that it accepts.
        options: see ``run``.
    """
    for name, flag in _changed_flags(options).items():
        if name not in names:
            mode = f"--{names[0].replace('_', '-')}"
            raise SettingError(f"{flag} does not go with {mode}.")


def _measure(checkpoint: str | None, options: argparse.Namespace, flags: list[str]) -> int:
    """Write an importance map."""
    mode = ("data", "importance") if options.data else ("importance", "prompt", "prompt_file")
    _require_only((*mode, "resume", "prune", "url", "max_model_len", "width"), options)
    from attnres_serve.lens import importance, inputs, losses

    path = out_path(options.importance, importance.SUFFIXES, options.width, "--importance")
    if not options.resume and (path.exists() or importance.losses_of(path).exists()):
        raise SettingError(
            f"--importance: {path} or its losses exist already; name a new file, or give --resume."
        )
    _check(checkpoint, options, flags)
    texts = [options.prompt] if options.data is None else inputs.data(options.data)
    if options.prune is not None and len(texts) < importance.FEWEST:
        raise SettingError(f"--prune needs {importance.FEWEST} texts; give more by --data.")
    flags = ["--enable-attnres-edits", f"--max-num-seqs={losses.BATCH}", *flags]
    with (
        output.bar(total=2, unit="step") as bar,
        _server(checkpoint, options, flags, bar) as server,
    ):
        for line in importance.measure(server, texts, path, options.prune, options.width):
            print(line, file=output.out())
    return 0
