"""``bench --http``: vLLM's benchmark client against any OpenAI-compatible server."""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import product
from math import inf
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple

from attnres_serve import sentences
from attnres_serve.address import authorization, base_of, past_proxies
from attnres_serve.bench.workload import PERCENTILES, STEPS, make_cases
from attnres_serve.checkpoints import tokenizer
from attnres_serve.compat import bench_client
from attnres_serve.compat.flags import spelling
from attnres_serve.errors import SettingError

TIMEOUT = 10  # seconds for the list of models
LONGEST = 2**20  # tokens of a sequence, if a server states no limit
REQUESTS = 20  # for every concurrent request
# Part of the context left free: the client's texts may have more tokens than requested.
SPARE = 16
METRICS = ("ttft", "tpot", "itl")


class Served(NamedTuple):
    """The model of a server.

    Attributes:
        model: the name of the measured model; vLLM's client would look it up without a key.
        longest: tokens of its longest sequence; infinity if the server does not state it.
    """

    model: str
    longest: float


def model_and_headers(flags: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model and the headers in flags of vLLM's client.

    Raises:
        SettingError: a flag has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--model")
    parser.add_argument("--header", nargs="*", default=[])
    try:
        options, _ = parser.parse_known_args(spelling.usual(flags))
    except argparse.ArgumentError as error:
        raise SettingError(f"found {error.argument_name} without a value; give it one.") from None
    return options.model, options.header


def check_there(url: str, model: str | None, extra_headers: Sequence[str] = ()) -> Served:
    """Refuse a server that cannot be measured: its address, its key, or the model's name is wrong.

    vLLM's client takes seconds to import, and reports every failed request.

    Args:
        url: the server's address.
        model: the model's name there; None for its first.
        extra_headers: headers as ``NAME=VALUE``; one of them may have the key.

    Raises:
        SettingError: the server cannot be measured; the message is one sentence.
    """
    from http.client import HTTPException  # not above: other commands do not need it
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    more = (header.partition("=") for header in extra_headers)
    headers = authorization() | {name: value for name, _, value in more}
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
    folder: Path, served: Served, options: argparse.Namespace, flags: Sequence[str]
) -> list[dict[str, Any]]:
    """The client's results, by its names, for every prompt length and load.

    Args:
        folder: the checkpoint, for its tokenizer.
        served: the result of ``check_there``.
        options: the flags of ``command.add_arguments``.
        flags: further flags of the client.

    Raises:
        SettingError: a number is out of its range, or a request failed.
    """
    longest = int(min(served.longest, LONGEST))
    cases = make_cases(longest - longest // SPARE, options.prompt_lengths, options.batches, STEPS)
    lengths = [case.context for case in cases if case.phase == "prefill"]
    place = tokenizer.readable(folder)
    fixed_flags = [
        f"--base-url={base_of(options.http)}",
        f"--model={served.model}",
        f"--tokenizer={place}",
    ]
    loads = []
    with past_proxies(options.http):
        for length, batch in product(lengths, dict.fromkeys(options.batches)):
            values = {
                "max-concurrency": batch,
                "random-input-len": length,
                "random-output-len": 1 + STEPS,
            }
            for number in (batch, REQUESTS * batch):  # the first warms up
                seed = SystemRandom().randrange(2**31)
                load = run_client(
                    values | {"num-prompts": number, "seed": seed}, [*fixed_flags, *flags]
                )
            loads.append(load)
    return loads


def run_client(values: dict[str, Any], fixed_flags: Sequence[str]) -> dict[str, Any]:
    """The client's results for one run.

    No prompt may be sent twice, because the server may cache it: every run has another seed, and
    the client's initial test request, which has its first prompt, is switched off.

    Args:
        values: values of the client's flags that differ between runs, by name.
        fixed_flags: its other flags.

    Raises:
        SettingError: a request failed.
    """
    # Imports numpy and pydantic, which other commands do not need.
    from attnres_serve.bench.document import Load

    flags = values | {
        "dataset-name": "random",
        "num-warmups": 0,
        "ready-check-timeout-sec": 0,
        "percentile-metrics": ",".join(METRICS),
        "metric-percentiles": ",".join(map(str, PERCENTILES)),
    }
    arguments = [f"--{flag}={value}" for flag, value in flags.items()]
    result = bench_client.ask_over_http(["--ignore-eos", *arguments, *fixed_flags])
    if result["completed"] < values["num-prompts"]:
        raise SettingError(
            f"{result['completed']} of {values['num-prompts']} requests succeeded, "
            f"{values['max-concurrency']} at a time; look into the server's log."
        )
    return Load.model_validate(result | {"seed": values["seed"]}).model_dump()


def render(loads: Sequence[Mapping[str, Any]]) -> str:
    """The figures as text."""
    header = "".join(f"{name:>11}" for name in ("at a time", "input", "output", "tokens/s"))
    lines = [f"{header}   {'ms':5}" + "".join(f"{f'p{percent}':>9}" for percent in PERCENTILES)]
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
