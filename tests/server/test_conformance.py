"""What others measure with works against a server: lm-eval's harness and guidellm's load.

They run as commands of an environment of their own (``requirements/soak.in``), which only
``make soak`` makes, offline, on data made here and with the demo's own tokenizer.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from client_page import block
from goldens import bound
from serving import DEMO, Server, running_demo, tail

from attnres_serve.checkpoints import tokenizer
from attnres_serve.verify import oracle

pytestmark = [pytest.mark.engine, pytest.mark.soak]

CLIENTS = LM_EVAL, GUIDELLM = "lm-eval", "guidellm"
CONTEXT, ANSWER = 512, 16
STOP = "\n\n"
TEXTS = [  # contexts and how they go on; the second of a pair is the less likely one
    ("import os\nimport", " sys\n"),
    ("import os\nimport", " xylophone\n"),
    ("class Stack:\n    def __init__(self", ", items):\n        self.items = items\n"),
    ("class Stack:\n    def __init__(self", " + 17 ** lambda"),
    ("def add(a, b):\n    return", " a + b\n"),
    ("for name in names:\n    print(", "name)\n"),
    ("try:\n    value = int(text)\nexcept", " ValueError:\n    value = None\n"),
    ("# Größe in Bytes\nGRÖSSE", " = 1024\n"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    """In float32, so that every logprob is within ``bound`` of a float64 model's."""
    for name in CLIENTS:
        command(name)  # before anything is started
    log = tmp_path_factory.mktemp("conformance") / "log"
    with running_demo(log, "--max-model-len", str(CONTEXT), "--dtype", "float32") as running:
        yield running


def command(name: str) -> Path:
    """A command of the clients' environment; without it there is nothing to test, which fails."""
    path = Path(f"{sys.prefix}-soak", "bin", name)
    if not path.exists():
        missing = f"{name} is not installed; run `requirements/setup.sh soak`, as make soak does."
        pytest.fail(missing, pytrace=False)
    return path


def run_client(folder: Path, name: str, *words: str, **env: str) -> None:
    """Run a client; it must end well."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    log = folder / f"{name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            [command(name), *words],
            cwd=folder,
            env=kept | offline | env,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, tail(log)


# --- lm-eval


@pytest.fixture(scope="module")
def samples(server, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What the harness kept of two tasks of its own formats, in the order of ``TEXTS``."""
    folder = tmp_path_factory.mktemp("lm-eval")
    data = folder / "texts.jsonl"
    rows = [{"context": context, "continuation": then} for context, then in TEXTS]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tasks = {
        "ours_loglikelihood": {
            "output_type": "loglikelihood",
            "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
        },
        "ours_generation": {
            "output_type": "generate_until",
            "generation_kwargs": {"until": [STOP], "max_gen_toks": ANSWER, "temperature": 0},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        task |= {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "doc_to_text": "{{context}}",
            "doc_to_target": "{{continuation}}",
            "target_delimiter": "",
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    words = shlex.split(block(LM_EVAL, "bash"))
    model = json.loads(words[words.index("--model_args") + 1])
    model |= {"base_url": f"{server.url}/v1/completions", "tokenizer": str(DEMO)}
    run_client(
        folder,
        LM_EVAL,
        *("run", "--model", "local-completions", "--tasks", *tasks),
        *("--model_args", json.dumps(model)),
        *("--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"),
    )
    found = {}
    for name in tasks:
        (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
        kept = [json.loads(line) for line in path.read_text().splitlines()]
        found[name] = sorted(kept, key=lambda sample: sample["doc_id"])
        assert [sample["doc"]["continuation"] for sample in found[name]] == [
            then for _, then in TEXTS
        ]
    return found


def test_loglikelihoods_are_those_of_a_float64_model(samples):
    """And so is whether the continuation is the greedy one."""
    model, ids = oracle.load(DEMO), encoder()
    for (context, then), sample in zip(TEXTS, samples["ours_loglikelihood"], strict=True):
        ((said, greedy),) = sample["filtered_resps"]
        whole, begin = ids(context + then), len(ids(context))
        rows = model.logprobs(whole)[begin - 1 : -1]
        wanted = [float(row[token]) for row, token in zip(rows, whole[begin:], strict=True)]
        assert float(said) == pytest.approx(sum(wanted), abs=sum(map(bound, wanted)))
        likeliest = rows.argmax(-1).tolist()
        assert greedy == str(likeliest == whole[begin:])


def test_generations_are_greedy_completions(samples, server):
    ids = encoder()
    answers = []
    for (context, _), sample in zip(TEXTS, samples["ours_generation"], strict=True):
        ((said,),) = sample["resps"]
        direct = server.complete(ids(context), max_tokens=ANSWER, stop=[STOP])
        assert said == direct["choices"][0]["text"]
        answers.append(said)
    assert all(answers) and len(set(answers)) > 3


def encoder():
    """From a text to token ids, without a token before it, as the harness does."""
    found = tokenizer.load(DEMO)
    return lambda text: found(text, add_special_tokens=False).input_ids


# --- guidellm


def test_a_sweep_has_no_errors(server, tmp_path):
    report = tmp_path / "report.json"
    scenario = yaml.safe_load(block(GUIDELLM, "yaml"))
    spec = scenario["spec"]
    spec["backend"]["target"] = server.url
    spec["tokenizer"]["model"] = str(DEMO)
    spec["outputs"][0]["path"] = str(report)
    answer = spec["data"][0]["output_tokens"]
    config = tmp_path / "scenario.json"
    config.write_text(json.dumps(scenario))
    one = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}  # there are ten, and perhaps two cores
    run_client(tmp_path, GUIDELLM, "run", "--config", str(config), "--disable-console", **one)
    benchmarks = json.loads(report.read_text())["benchmarks"]
    assert len(benchmarks) == spec["profile"]["sweep_size"]
    for benchmark in benchmarks:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] > 0 and totals["errored"] == 0, totals
        for request in benchmark["requests"]["successful"]:
            assert request["output_tokens"] == answer
