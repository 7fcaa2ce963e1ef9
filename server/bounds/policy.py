"""The flags that bound clients' requests, and the API keys of a file."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from attnres_serve.compat.flags import kinds
from attnres_serve.errors import SettingError


@dataclass(frozen=True)
class Policy:
    """Bounds of one API server process; several processes count separately."""

    public_metrics: bool = False
    max_body_bytes: int = 4 * 2**20  # 4096 token ids of each of 128 prompts
    max_concurrent_requests: int = 1024
    max_sequences: int = 256  # vLLM's bounds: 1024 prompts, and 16384 sequences for each
    max_trace_tokens: int = 4096  # a replay pauses the engine
    max_trace_weights: int = 2**18  # a response of about 6 MB
    max_trace_bytes: int = 64 * 2**20
    drain_delay: int = 0  # seconds
    enable_weight_updates: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every bound, and one for the keys."""
    parser.add_argument(
        "--api-key-file",
        metavar="PATH",
        help="file with the API keys, one a line; every route but the probes asks for one of them",
    )
    parser.add_argument(
        "--public-metrics",
        action=argparse.BooleanOptionalAction,
        help="answer GET /metrics without a key",
    )
    parser.add_argument(
        "--enable-weight-updates",
        action=argparse.BooleanOptionalAction,
        help="open the routes by which a trainer pauses the server and replaces its weights",
    )
    parser.add_argument(
        "--enable-attnres-edits",
        action=argparse.BooleanOptionalAction,
        help="open the route by which the edits change that the model is served under",
    )
    bounds = {
        "max_body_bytes": "size of a request's body; 413 over it",
        "max_concurrent_requests": "requests that are being answered; 429 over it",
        "max_sequences": "prompts times answers (n) of one request; 400 over it",
        "max_trace_tokens": "prompt and answer of one trace; 400 over it",
        "max_trace_weights": "tokens x sites x their sources of one trace; 400 over it",
        "max_trace_bytes": "vectors of one trace; 400 over it",
    }
    for name, meaning in bounds.items():
        default = getattr(Policy, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(
            flag,
            type=kinds.positive,
            default=default,
            metavar="N",
            help=f"{meaning} (default: {default})",
        )
    parser.add_argument(
        "--drain-delay",
        type=kinds.natural,
        default=Policy.drain_delay,
        metavar="SECONDS",
        help="after a signal, take new requests for so long while /ready says 503 (default: 0)",
    )


def from_flags(flags: Mapping[str, Any]) -> Policy:
    """The policy with these values of flags, by name."""
    return Policy(**{one.name: flags[one.name] for one in fields(Policy) if one.name in flags})


def read_keys(path: str) -> list[str]:
    """The API keys of a file, one a line.

    Raises:
        SettingError: the file cannot be read, has no key, or a line is no key.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise SettingError(
            f"{path} cannot be read for --api-key-file ({error.strerror}); name a file that has "
            "one key a line."
        ) from None
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key:
            continue
        if not all(0x21 <= byte <= 0x7E for byte in key):  # a header can hold nothing else
            raise SettingError(
                f"line {number} of {path} is no API key; a key is printable ASCII without blanks, "
                "and the file of --api-key-file has nothing but keys."
            )
        keys.append(key.decode())
    if not keys:
        raise SettingError(f"{path} has no API key; write one a line, or leave --api-key-file out.")
    return keys
