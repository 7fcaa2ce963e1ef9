"""The ``attnres-serve`` command."""

import argparse
import difflib
import os
import signal
import sys
import textwrap
from itertools import pairwise

from attnres_serve import __version__, output, sentences, settings
from attnres_serve.bench import command as bench
from attnres_serve.checkpoints import check
from attnres_serve.compat import arguments as vllm_arguments
from attnres_serve.compat import environment, openai_server
from attnres_serve.compat.flags import parser as flags
from attnres_serve.compat.flags import reading
from attnres_serve.compat.flags.advice import names_of
from attnres_serve.compat.flags.flag import Flag
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.lens import command as inspect
from attnres_serve.server import launcher
from attnres_serve.start import events
from attnres_serve.verify import command as verify


def examples(*lines: str) -> str:
    return "\n  ".join(["Examples:", *(f"attnres-serve {line}" for line in lines)])


EXAMPLES = examples(
    "check path/to/checkpoint",
    "serve path/to/checkpoint --port 9000",
    'inspect path/to/checkpoint --prompt "import os" --out trace.png',
)


class HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs without breaking a flag, and leaves examples as they are written."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if part.startswith("Examples:") else "\n".join(self._split_lines(part, width))
            for part in text.split("\n\n")
        )


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnres-serve",
        description="Serve Attention Residuals models with vLLM.",
        formatter_class=HelpFormatter,
        epilog=f"{EXAMPLES}\n\nEach command has a --help with examples of its own.",
    )
    parser.add_argument("--version", action="version", version=f"attnres-serve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, **options) -> argparse.ArgumentParser:
        return commands.add_parser(name, formatter_class=HelpFormatter, **options)

    serve = add(
        "serve",
        help="serve a checkpoint over HTTP",
        usage="attnres-serve serve [CHECKPOINT] [--attnres-algorithm ALGORITHM] [flags]",
        description="Serve a checkpoint with vLLM's OpenAI-compatible server.",
        epilog=f"Any other flag is vLLM's, for example --host (default: {launcher.DEFAULT_HOST}) "
        f"and --port (default: {launcher.DEFAULT_PORT}). --config FILE takes flags, ours too, from "
        "a YAML file. A flag of ours may also be a variable, such as ATTNRES_API_KEY_FILE.\n\n"
        "--help=groups lists the groups of all flags, --help=ModelConfig shows one, "
        "--help=max-model-len what has such a name, --help=all everything.\n\n"
        + examples(
            "serve path/to/checkpoint",
            "serve path/to/checkpoint --port 9000 --max-model-len 4096",
            "serve path/to/checkpoint --enforce-eager --served-model-name demo",
            "serve path/to/checkpoint --host 0.0.0.0 --api-key-file keys.txt",
            "serve --config serve.yaml",
        ),
        allow_abbrev=False,
    )
    launcher.add_arguments(serve)
    judge = add(
        "check",
        help="say what would be served, or why not",
        description="Validate a checkpoint from its config.json and the headers of its safetensors "
        "files, and check that it has what a server needs, as `serve` does. Exit status: 0 it can "
        "be served, 1 it cannot.",
        epilog=examples("check path/to/checkpoint", "check path/to/checkpoint --json"),
    )
    judge.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder, or id of a model in the cache"
    )
    judge.add_argument("--json", action="store_true", help="print one JSON object")
    convert = add(
        "convert",
        help="make safetensors, the house format or zero queries",
        description="Write a checkpoint that computes what SRC computes into the new folder DST. "
        "Pickles (.bin, .pt) become safetensors, reading tensors only; values and types stay as "
        "they are.",
        epilog=examples(
            "convert pickles safetensors",
            "convert published house --to house --dry-run",
            "convert plain-llama attnres --add-zero-queries --block-size 4",
            "convert trained attnres --block-size 4",
            "convert trained ablated --edit 'mask sources=\"block 2\"'",
            "convert own attnres --rename 'blocks.*.att.wq=model.layers.*.self_attn.q_proj'",
        ),
    )
    convert.add_argument("source", metavar="SRC", help="folder, or id of a model in the cache")
    convert.add_argument("target", metavar="DST", help="folder to make")
    convert.add_argument("--to", choices=["house"], help="write this format, whatever SRC has")
    convert.add_argument(
        "--add-zero-queries",
        action="store_true",
        help="give a model with standard residuals zero queries and unit key norms: an AttnRes "
        "model that computes the same up to the norms' eps, in the house format",
    )
    convert.add_argument(
        "--block-size",
        type=int,
        metavar="S",
        help="sublayers per block of the added queries; without --add-zero-queries, of a model "
        "that has queries and whose config.json is a plain model's: S is written into it",
    )
    convert.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="give tensors that are called OLD the name NEW before anything else. Both are whole "
        "names or their beginnings up to a dot. A * stands for the same text without a dot in "
        "both. Repeat it for more; each rename reads what the ones before it left",
    )
    settings.add_edits(convert, "edit", "write an edit of what sites read, in the house format")
    convert.add_argument("--dry-run", action="store_true", help="only say what would be written")
    verify.add_arguments(
        add(
            "verify",
            help="compare a checkpoint as served with a float64 model",
            description="Serve a checkpoint in float32 and compare it with a float64 model, as a "
            "whole and part by part. Say if texts are predicted better with config.json read "
            "otherwise. The engine starts in about 20 seconds on two cores, and each step says "
            "that it begins. Exit status: 0 it holds, 1 it does not, 2 it was refused or "
            "could not be compared.",
            epilog=examples(
                "verify path/to/checkpoint",
                "verify converted --reference original --text sample.txt",
            ),
        )
    )
    bench.add_arguments(
        add(
            "bench",
            help="measure latency against standard residuals",
            usage="attnres-serve bench CHECKPOINT [options] [flags of vLLM's engine]",
            description="Measure prefill and decode of a checkpoint against the same model with "
            "standard residuals in stock vLLM, in one interleaved run. Each engine compiles at its "
            "first start: on two cores --quick takes two minutes for the demo, and says "
            "where the time goes. Unless stdout is a "
            "terminal, the last line is one JSON document. Exit status: 0 measured, 2 refused.",
            epilog="Any other flag is vLLM's engine's and given to both, for example "
            "--max-model-len, --dtype, --tensor-parallel-size.\n\n"
            + examples(
                "bench path/to/checkpoint --quick",
                "bench path/to/checkpoint --budget 30 --json > result.json",
                "bench path/to/checkpoint --http http://127.0.0.1:8000",
            ),
            allow_abbrev=False,
        )
    )
    inspect.add_arguments(
        add(
            "inspect",
            help="draw what the sites of a prompt attend to",
            usage="attnres-serve inspect CHECKPOINT --prompt TEXT [options] [flags of serve]"
            "\n       attnres-serve inspect --url URL --prompt TEXT [options]"
            "\n       attnres-serve inspect --from FILE.json [options]"
            "\n       attnres-serve inspect CHECKPOINT --queries [options]",
            description="Trace a prompt on a server of its own, or on a running one, and draw "
            "it: the weights of every site on its sources, for a token and on average. A server of "
            "its own starts in about 20 seconds on two cores. Exit "
            "status: 0 written, 2 refused.",
            epilog="Any other flag is that of `serve`, for example --dtype, "
            "--tensor-parallel-size, --served-model-name.\n\n"
            + examples(
                'inspect path/to/checkpoint --prompt "import os" --out trace.json',
                "inspect --from trace.json --out trace.png",
                'inspect path/to/checkpoint --prompt "import os" --edit "mask sources=partial"',
                "inspect path/to/checkpoint --data texts.jsonl --importance map.json",
                "inspect path/to/checkpoint --queries --out queries.csv",
                "inspect --url http://127.0.0.1:8000 --prompt-file question.txt --out page.html",
            ),
            allow_abbrev=False,
        )
    )
    for name in ("verify", "bench", "inspect"):
        commands.choices[name].add_argument(
            "--verbose", action="store_true", help="show what vLLM and torch write, too"
        )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        Its exit status: 0 done, 1 for a checkpoint that ``check`` or ``verify`` finds wanting, 2
        for input that is refused otherwise, 130 after an interruption, 141 where nobody reads what
        it says.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # as `| head` leaves it
        if arguments[:1] == ["serve"]:  # vLLM handles it
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 128 + signal.SIGPIPE
    return status


def _run(arguments: list[str]) -> int:
    if arguments[:1] in ([], ["help"]):
        arguments = [*arguments[1:2], "--help"]
    # Take the checkpoint out by its place: argparse does not know vLLM's flags and would take the
    # value of one for the checkpoint.
    checkpoint, command = None, list(arguments)
    by_place = arguments[:1] in (["serve"], ["bench"], ["inspect"])
    if by_place and len(arguments) > 1 and not arguments[1].startswith("-"):
        checkpoint = arguments.pop(1)
    if (topic := _topic(arguments)) is not None:
        return _show_flags(topic)
    parser = build_parser()
    if problem := _no_command(arguments[0], parser) or _wrong_value(arguments, parser):
        _say(problem)
        return 2
    serves = arguments[0] == "serve" and not {"-h", "--help"} & {*arguments}
    options, others = parser.parse_known_args(["serve"] if serves else arguments)
    if others and options.command not in ("serve", "bench", "inspect"):
        names = {word for flag in _flags(options.command, parser) for word in flag.spellings}
        _say(flags.unknown_arguments(others, names, f"{options.command} --help"))
        return 2
    try:
        if options.command in ("serve", "verify", "bench", "inspect"):  # they start engines
            environment.make_usable()
        if options.command == "serve":
            ours = reading.ours(launcher.add_arguments)
            served = vllm_arguments.of_serve(checkpoint, arguments[1:], ours, os.environ)
            with served.placed():
                launcher.serve(served)
        elif options.command == "check":
            check.check(options.checkpoint, options.json)
        elif options.command == "verify":
            with output.libraries_hidden("verify", options.verbose):
                return verify.run(options)
        elif options.command == "bench":
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as of convert
            with output.libraries_hidden("bench", options.verbose):
                return bench.run(checkpoint, options, others, command)
        elif options.command == "inspect":
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            ours = reading.ours(launcher.add_arguments)
            names = names_of(inspect.add_arguments)
            vllm_arguments.of_serve(checkpoint, others, ours, None, names)
            with output.libraries_hidden("inspect", options.verbose):
                return inspect.run(checkpoint, options, others)
        else:
            _convert(options)
    except (CheckpointError, SettingError) as error:
        if options.command == "serve" and events.is_heard():
            events.tell("refused", reason=sentences.for_terminal(str(error)))
        else:
            _say(error)
        return 1 if options.command == "check" else 2
    except ModuleNotFoundError as error:
        if options.command == "serve":  # vLLM handles it
            raise
        print(
            f"attnres-serve: {error.name} is not installed; install vLLM, or attnres-serve with "
            "the extra cpu or cuda.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("attnres-serve: interrupted.", file=sys.stderr)
        return 130
    return 0


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (commands,) = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    return commands


def _flags(command: str, parser: argparse.ArgumentParser) -> list[Flag]:
    """The flags of a command that are ours."""
    return reading.of_parser(_commands(parser)[command])


def _wrong_value(arguments: list[str], parser: argparse.ArgumentParser) -> str | None:
    """The sentence that refuses a value of a flag of ours; `serve` reads its flags itself."""
    command, *values = arguments
    if command != "serve" and not command.startswith("-"):
        try:
            flags.check(values, _flags(command, parser))
        except SettingError as error:
            return str(error)
    return None


def _no_command(word: str, parser: argparse.ArgumentParser) -> str | None:
    """The sentence that refuses an unknown command; None for a command or a flag."""
    commands = _commands(parser)
    if word.startswith("-") or word in commands:
        return None
    near = difflib.get_close_matches(word, commands, n=1, cutoff=0.5)
    if near:
        return f"{word!r} is no command; did you mean {near[0]}?"
    return f"{word!r} is no command; expected one of {', '.join(commands)}."


def _topic(arguments: list[str]) -> str | None:
    """The topic that ``serve --help=TOPIC`` asks for, of vLLM's flags; None for another command."""
    for word, following in pairwise([*arguments, "-"] if arguments[:1] == ["serve"] else []):
        if word.startswith("--help="):
            return word.partition("=")[2]
        if word in ("-h", "--help"):
            return None if following.startswith("-") else following
    return None


def _show_flags(topic: str) -> int:
    try:
        openai_server.print_flags(topic, launcher.add_arguments)
    except SettingError as error:
        _say(error)
        return 2
    return 0


def _say(sentence: object) -> None:
    print(f"attnres-serve: {sentences.for_terminal(str(sentence))}", file=sys.stderr)


def _convert(options: argparse.Namespace) -> None:
    if options.add_zero_queries and options.block_size is None:
        raise SettingError(
            "--add-zero-queries needs --block-size S (in sublayers; 1 is Full AttnRes)."
        )
    from attnres_serve.checkpoints.convert.command import convert  # imports torch

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it leaves nothing behind
    added, stated = (
        (options.block_size, None) if options.add_zero_queries else (None, options.block_size)
    )
    convert(
        options.source,
        options.target,
        options.to == "house",
        added,
        options.dry_run,
        stated,
        options.rename,
        options.edit,
    )
