"""The ``attnres-serve`` command."""

import argparse
import sys

from attnres_serve import __version__
from attnres_serve.errors import CheckpointError, SettingError
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
        "--dtype, --enforce-eager, --api-key, --served-model-name.",
        allow_abbrev=False,
    )
    launcher.add_arguments(serve)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns its exit status: 0 done, 2 for input that is refused."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # The checkpoint is taken out by its place: argparse would take the value of a flag of vLLM's,
    # which it does not know, for it.
    checkpoint = None
    if arguments[:1] == ["serve"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        checkpoint = arguments.pop(1)
    own, others = build_parser().parse_known_args(arguments)
    try:
        launcher.serve(checkpoint, own, others)
    except (CheckpointError, SettingError) as error:
        print(f"attnres-serve: {error}", file=sys.stderr)
        return 2
    return 0
