"""``bench --http``: vLLM's own benchmark client against any OpenAI-compatible server."""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple

from attnres_serve import sentences, settings
from attnres_serve.address import base_of, past_proxies
from attnres_serve.bench.workload import PERCENTILES, STEPS, make_cells
from attnres_serve.checkpoints import tokenizer
from attnres_serve.compat import bench_client
from attnres_serve.compat.flags import spelling
from attnres_serve.errors import SettingError

TIMEOUT = 10  # seconds for the list of models
LONGEST = 2**20  # tokens of a sequence, where a server does not say its own
REQUESTS = 20  # for every one that runs at a time
SPARE = 16  # the client's texts may have more tokens than asked, so a part of the context is spared
METRICS = ("ttft", "tpot", "itl")


class Served(NamedTuple):
    """What a server has.

    Attributes:
        model: the name of the model that is measured; vLLM's client would ask without a key.
        longest: tokens of its longest sequence; infinity where that is not said.
    """

    model: str
    longest: float


def asked(flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model and the headers that flags of vLLM's client name.

    Raises:
        SettingError: one of them has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model")
    parser.add_argument("--header", nargs="*", default=[])
    try:
        found, _ = parser.parse_known_args(spelling.usual(flags))
    except argparse.ArgumentError as error:
        raise SettingError(f"found {error.argument_name} without a value; give it one.") from None
    return found.model, found.header


def check_there(url: str, model: str | None, given: Sequence[str] = ()) -> Served:
    """Refuse a server that cannot be measured: its address, its key, or the model's name is wrong.

    vLLM's client takes seconds to import, and tells of every request that fails.

    Args:
        url: of the server.
        model: the model's name there; None for its first.
        given: headers as ``NAME=VALUE``, among which one may have the key.

    Raises:
        SettingError: with one sentence: what was found, what is expected, how to fix it.
    """
    from http.client import HTTPException  # which other commands do without
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    more = (header.partition("=") for header in given)
    headers = settings.authorization() | {name: value for name, _, value in more}
    try:
        request = Request(f"{base_of(url)}/v1/models", headers=headers)
        with past_proxies(url), urlopen(request, timeout=TIMEOUT) as answer:
            content = answer.read()
    except HTTPError as error:
        raise SettingError(_refusal(url, error.code, headers)) from None
    except (OSError, HTTPException, ValueError) as error:
        raise SettingError(_nothing(url, str(getattr(error, "reason", error)))) from None
    try:
        models = {entry["id"]: entry for entry in json.loads(content)["data"]}
        name = model or next(iter(models))
    except (ValueError, KeyError, TypeError, StopIteration):
        raise SettingError(_nothing(url, "/v1/models gives no list of models")) from None
    if name not in models:
        raise SettingError(
            f"the server at {url} has no model {name}; it has {sentences.some(models)}. "
            "Correct --model, or leave it out for the first."
        )
    return Served(name, models[name].get("max_model_len") or inf)


def _nothing(url: str, why: str) -> str:
    return (
        f"no OpenAI-compatible server answers at {url} ({why}); expected the address of one, for "
        "example http://127.0.0.1:8000. Start one with `attnres-serve serve CHECKPOINT`, or "
        "correct --http."
    )


def _refusal(url: str, status: int, headers: Mapping[str, str]) -> str:
    if status not in (401, 403):
        return _nothing(url, f"/v1/models has status {status}")
    if "authorization" in map(str.lower, headers):
        return f"the server at {url} refuses the key (status {status}); correct OPENAI_API_KEY."
    return f"the server at {url} asks for a key (status {status}); set OPENAI_API_KEY to it."


def measure(
    folder: Path, served: Served, own: argparse.Namespace, flags: Sequence[str]
) -> list[dict[str, Any]]:
    """What the client finds, by its own names, for every prompt length and load.

    Args:
        folder: of the checkpoint, read for its tokenizer.
        served: what ``check_there`` found.
        own: what ``command.add_arguments`` defines.
        flags: further flags of the client.

    Raises:
        SettingError: a number is out of its range, or a request failed.
    """
    longest = int(min(served.longest, LONGEST))
    cells = make_cells(longest - longest // SPARE, own.prompt_lengths, own.batches, STEPS)
    lengths = [cell.context for cell in cells if cell.phase == "prefill"]
    place = tokenizer.readable(folder)
    words = [f"--base-url={base_of(own.http)}", f"--model={served.model}", f"--tokenizer={place}"]
    loads = []
    with past_proxies(own.http):
        for length, batch in product(lengths, dict.fromkeys(own.batches)):
            asked = {
                "max-concurrency": batch,
                "random-input-len": length,
                "random-output-len": 1 + STEPS,
            }
            for number in (batch, REQUESTS * batch):  # the first to warm up
                seed = SystemRandom().randrange(2**31)
                found = ask(asked | {"num-prompts": number, "seed": seed}, [*words, *flags])
            loads.append(found)
    return loads


def ask(asked: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """What the client finds, run once.

    No prompt may come twice, because the server may keep what it has computed of it: no run is to
    have the seed of another, and what the client would ask before, which is its first prompt, is
    not asked.

    Args:
        asked: values of the client's flags, by their names; they differ from run to run.
        words: its other flags.

    Raises:
        SettingError: a request failed.
    """
    from attnres_serve.bench.document import Load  # numpy and pydantic, which other commands spare

    flags = asked | {
        "dataset-name": "random",
        "num-warmups": 0,
        "ready-check-timeout-sec": 0,
        "percentile-metrics": ",".join(METRICS),
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
    }
    given = [f"--{flag}={value}" for flag, value in flags.items()]
    found = bench_client.ask_over_http(["--ignore-eos", *given, *words])
    if found["completed"] < asked["num-prompts"]:
        raise SettingError(
            f"{found['completed']} of {asked['num-prompts']} requests succeeded, "
            f"{asked['max-concurrency']} at a time; look into the server's log."
        )
    return Load.model_validate(found | {"seed": asked["seed"]}).model_dump()


def render(loads: Sequence[Mapping[str, Any]]) -> str:
    """The figures for a person."""
    head = "".join(f"{name:>11}" for name in ("at a time", "input", "output", "tokens/s"))
    lines = [f"{head}   {'ms':5}" + "".join(f"{f'p{percent}':>9}" for percent in PERCENTILES)]
    for load in loads:
        lengths = (
            load[f"total_{which}_tokens"] / load["completed"] for which in ("input", "output")
        )
        begin = f"{load['max_concurrency']:11}" + "".join(f"{tokens:11.0f}" for tokens in lengths)
        begin += f"{load['output_throughput']:11.1f}"
        for metric in METRICS:
            times = "".join(f"{load[f'p{percent}_{metric}_ms']:9.2f}" for percent in PERCENTILES)
            lines.append(f"{begin:44}   {metric.upper():5}{times}")
            begin = ""
    lines.append("input, output: tokens of a request; tokens/s: of outputs, all requests together.")
    return "\n".join(lines)
