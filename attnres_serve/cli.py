"""The ``attnres-serve`` command."""

import argparse
import os
import signal
import sys

from attnres_serve import __version__, check, verify
from attnres_serve.bench import command as bench
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.inspect import command as inspect
from attnres_serve.server import launcher


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="attnres-serve", description="Serve Attention Residuals models with vLLM."
    )
    parser.add_argument("--version", action="version", version=f"attnres-serve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint over HTTP",
        usage="attnres-serve serve [CHECKPOINT] [--attnres-algorithm ALGORITHM] [flags]",
        description="Serve a checkpoint with vLLM's OpenAI-compatible server.",
        epilog="Any other flag is vLLM's: see `vllm serve --help`, for example --max-model-len, "
        "--dtype, --enforce-eager, --served-model-name.",
        allow_abbrev=False,
    )
    launcher.add_arguments(serve)
    judge = commands.add_parser(
        "check",
        help="say what would be served, or why not",
        description="Judge a checkpoint by its config.json and the headers of its safetensors "
        "files, as `serve` does. Exit status: 0 it can be served, 1 it cannot.",
    )
    judge.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="folder, or id of a model in the cache"
    )
    judge.add_argument("--json", action="store_true", help="print one JSON object")
    convert = commands.add_parser(
        "convert",
        help="make safetensors, the house format or zero queries",
        description="Write a checkpoint that computes what SRC computes into the new folder DST. "
        "Pickles (.bin, .pt) become safetensors, reading tensors only; values and types stay as "
        "they are.",
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
        "--block-size", type=int, metavar="S", help="sublayers per block of the added queries"
    )
    convert.add_argument("--dry-run", action="store_true", help="only say what would be written")
    verify.add_arguments(
        commands.add_parser(
            "verify",
            help="prove that a checkpoint is served as it was trained",
            description="Serve a checkpoint in float32 and compare it with a float64 model, as a "
            "whole and part by part. Exit status: 0 it holds, 1 it does not, 2 it was refused or "
            "could not be compared.",
        )
    )
    bench.add_arguments(
        commands.add_parser(
            "bench",
            help="measure latency against standard residuals",
            usage="attnres-serve bench CHECKPOINT [options] [flags of vLLM's engine]",
            description="Measure prefill and decode of a checkpoint against the same model with "
            "standard residuals in stock vLLM, in one interleaved run. The last line is one JSON "
            "document. Exit status: 0 measured, 2 refused.",
            epilog="Any other flag is vLLM's engine's and given to both, for example "
            "--max-model-len, --dtype, --enforce-eager, --tensor-parallel-size.",
            allow_abbrev=False,
        )
    )
    inspect.add_arguments(
        commands.add_parser(
            "inspect",
            help="draw what the sites of a prompt attend to",
            usage="attnres-serve inspect CHECKPOINT --prompt TEXT [options] [flags of vLLM's "
            "engine]\n       attnres-serve inspect --url URL --prompt TEXT [options]",
            description="Trace a prompt in an engine of its own, or on a running server, and draw "
            "it: the weights of every site on its sources, for a token and on average, the "
            "magnitude of the sources and the entropy of the weights. Exit status: 0 written, 2 "
            "refused.",
            epilog="Any other flag is vLLM's engine's, for example --dtype, "
            "--tensor-parallel-size, --served-model-name.",
            allow_abbrev=False,
        )
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
        if arguments[:1] == ["serve"]:  # vLLM's own affair
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 128 + signal.SIGPIPE
    return status


def _run(arguments: list[str]) -> int:
    # The checkpoint is taken out by its place: argparse would take the value of a flag of vLLM's,
    # which it does not know, for it.
    checkpoint, command = None, list(arguments)
    by_place = arguments[:1] in (["serve"], ["bench"], ["inspect"])
    if by_place and len(arguments) > 1 and not arguments[1].startswith("-"):
        checkpoint = arguments.pop(1)
    parser = build_parser()
    own, others = parser.parse_known_args(arguments)
    if others and own.command not in ("serve", "bench", "inspect"):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        if own.command == "serve":
            launcher.serve(checkpoint, own, others)
        elif own.command == "check":
            check.check(own.checkpoint, own.json)
        elif own.command == "verify":
            return verify.run(own)
        elif own.command == "bench":
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as of convert
            return bench.run(checkpoint, own, others, command)
        elif own.command == "inspect":
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            return inspect.run(checkpoint, own, others)
        else:
            _convert(own)
    except (CheckpointError, SettingError) as error:
        print(f"attnres-serve: {error}", file=sys.stderr)
        return 1 if own.command == "check" else 2
    except ModuleNotFoundError as error:
        if own.command == "serve":  # vLLM's own affair
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


def _convert(own: argparse.Namespace) -> None:
    if own.add_zero_queries != (own.block_size is not None):
        raise SettingError(
            "--add-zero-queries and --block-size S (in sublayers; 1 is Full AttnRes) go together; "
            "give both or neither."
        )
    from attnres_serve.convert import convert  # imports torch

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it leaves nothing behind
    convert(own.source, own.target, own.to == "house", own.block_size, own.dry_run)
