"""Weights that were replaced in a running engine answer as in an engine that started on them.

To the bit: both are loaded and processed by the same code.  Every engine has answered before, and
the longer prompt is then in its prefix cache.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_sites
import torch
from checkpoints import (
    computes_int8,
    quantised,
    write_alice_ai,
    write_fla,
    write_fla_delta,
    write_house,
    write_kimi_names,
    write_mode,
    write_nanogpt,
    write_titan,
)
from draft_heads import add_head, write_eagle
from facts import FACTS
from jobs import fresh_prompts, run_replace_jobs
from safetensors.torch import load_file, save_file
from serving import FAMILY_GOLDENS

from attnres_serve.compat.workarounds.replacing_calls import BUSY
from tests.end_to_end.test_families import chosen
from tests.end_to_end.test_speculation import continued

pytestmark = pytest.mark.engine

WEIGHTS = "model.safetensors"
LENGTHS = (9, 150)  # the longer one is more than a block of the cache
RECEIVES = {"weight_transfer_config": {"backend": "shared_memory"}}
TIED = "tied qwen3"
# Families by a name; "tied" where the head is the embedding.
CASES = {name: name for name in FACTS} | {f"tied {name}": name for name in ("qwen3", "llama")}
ALWAYS = (TIED, "alice_ai")
LISTED = (
    *("qwen3", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v2"),
    *("kimi_linear", "qwen3_next", "mamba2", "kda", "gated_deltanet", "gated_llama"),
)


def write(folder: Path, name: str, seed: int, **more: Any) -> Path:
    family = CASES[name]
    variants = FACTS[family].variants
    usual = variants.get("", next(iter(variants.values())))
    shape = {"layers": 4, "block_size": 3, "dtype": "float32"}
    shape |= {"tie": True} if name.startswith("tied ") else {}
    return write_house(folder, family, seed=seed, changes=usual, **shape | more)


def job(checkpoint: Path, prompts: Any, *steps: Any, mode: str = "eager", **options: Any) -> Any:
    return {
        "checkpoint": str(checkpoint),
        "prompts": prompts,
        "dtype": "float32",
        "mode": mode,
        "options": options,
        "steps": [list(map(str, step)) for step in steps],
    }


Pair = tuple[Path, Path]


def crossed(
    root: Path, pairs: Mapping[str, tuple[Pair, dict[str, Any]]], asked: Any = None
) -> dict[str, list[Any]]:
    """Start engines on two checkpoints, and give each the weights of the other, by every way.

    Args:
        root: for files.
        pairs: two checkpoints and options of their jobs, by a name.
        asked: the prompts; None for fresh ones.
    """
    jobs, prompts = [], asked or fresh_prompts(LENGTHS)
    for (first, second), options in pairs.values():
        there_and_back = ["reload_weights", second], ["tensors", first]
        jobs.append(job(first, prompts, *there_and_back, **options))
        jobs.append(job(second, prompts, ["routes", first], **RECEIVES | options))
    found = run_replace_jobs(jobs, root / "run")
    return dict(zip(pairs, zip(found[::2], found[1::2], strict=True), strict=True))


def drawn(root: Path, name: str) -> Pair:
    first, second = (write(root / f"{name} {seed}", name, seed) for seed in (31, 32))
    return first, second


def check(first: list[dict[str, Any]], second: list[dict[str, Any]], caches: bool = True) -> None:
    assert [step["refused"] for step in (*first, *second)] == [None] * 5
    assert first[0]["answers"] != second[0]["answers"]
    assert first[1:] == [second[0], first[0]] and second[1] == first[0]
    assert first[1]["cached"][0] == 0 and (first[1]["cached"][1] >= 128) == caches


@pytest.fixture(scope="module")
def of_families(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    return crossed(root, {name: (drawn(root, name), {}) for name in chosen(request, "name")})


def marked(name: str) -> Any:
    if name in ALWAYS:
        return name
    listed = pytest.mark.families if name in LISTED else pytest.mark.exhaustive
    return pytest.param(name, marks=listed)


@pytest.mark.parametrize("name", [*map(marked, CASES)])
def test_a_family(of_families, name):
    check(*of_families[name], FACTS[CASES[name]].caches_prefixes)


def turned(folder: Path) -> Pair:
    """A checkpoint, and another one with the rows of every tensor in reverse order."""
    other = shutil.copytree(folder, folder.parent / f"{folder.name} turned")
    tensors = load_file(folder / WEIGHTS)
    turned = {name: tensor.flip(0) if tensor.dim() else tensor for name, tensor in tensors.items()}
    save_file(turned, other / WEIGHTS, metadata={"format": "pt"})
    return folder, other


def write_kimi(folder: Path) -> Path:
    """A checkpoint in Kimi Linear's own format."""
    write_house(folder, "kimi_linear", layers=4, block_size=2)
    config = json.loads((folder / "config.json").read_text())
    del config["attn_res"], config["max_position_embeddings"]
    own = {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    own |= {"attn_res_block_size": 1, "model_max_length": 512}
    (folder / "config.json").write_text(json.dumps(config | own))
    return folder


FORMATS: dict[str, Callable[[Path], Path]] = {
    "nanogpt": write_nanogpt,
    "transformer": partial(write_fla, qkv_bias=True, qk_norm=True),
    "tied transformer": partial(write_fla, tie=True),
    "gated_deltanet": partial(write_fla_delta, model_type="gated_deltanet"),
    "kda": partial(write_fla_delta, model_type="kda"),
    "kimi_linear": write_kimi,
    "kimi k3": partial(shutil.copytree, FAMILY_GOLDENS / "kimi_k3"),
    "alice_ai": partial(write_alice_ai, layers=4, per_block=1),
    "open-attnres": partial(write_mode, cumulative=True),
    "delta-attnres": partial(write_mode, base="llama", mode="full"),
    "torchtitan": write_titan,
    "qwen3_ar": partial(write_kimi_names, block_layers=1, layers=3),
}


@pytest.fixture(scope="module")
def of_formats(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("formats")
    names = chosen(request, "name")
    return crossed(root, {name: (turned(FORMATS[name](root / name)), {}) for name in names})


@pytest.mark.families
@pytest.mark.parametrize("name", FORMATS)
def test_a_format(of_formats, name):
    caches = name not in ("gated_deltanet", "kda", "kimi_linear", "kimi k3")
    check(*of_formats[name], caches)


TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
ONE_PASS = {"additional_config": {"attnres_algorithm": "single_pass"}}
OPTIONS: dict[str, dict[str, Any]] = {
    "compiled": {"mode": "compiled"},
    "single pass, compiled": {"mode": "compiled", **ONE_PASS},
    "single pass": ONE_PASS,
    "TP": TWO,
    "PP": STAGES,
}
SHOWN = {  # families by what an engine is asked for
    "compiled": (TIED, "qwen3_moe"),
    "single pass, compiled": ("deepseek_v2", "qwen3_next"),
    "single pass": ("gemma3_text",),
    "TP": (TIED, "kimi_linear"),
    "PP": (TIED, "mixtral"),
}
WITH = [f"{name}, {option}" for option, names in SHOWN.items() for name in names]


@pytest.fixture(scope="module")
def with_options(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("options")
    pairs = {}
    for case in chosen(request, "case"):
        name, _, option = case.partition(", ")
        (root / option).mkdir(exist_ok=True)
        pairs[case] = drawn(root / option, name), OPTIONS[option]
    return crossed(root, pairs)


@pytest.mark.families
@pytest.mark.parametrize("case", WITH)
def test_an_engine_with_options(with_options, case):
    name = case.partition(", ")[0]
    check(*with_options[case], FACTS[CASES[name]].caches_prefixes)


@computes_int8
@pytest.mark.families
def test_quantised_weights(tmp_path):
    base = turned(write_house(tmp_path / "base", layers=4, block_size=3, hidden=128))
    pair = tuple(quantised(tmp_path / f"int8 {place}", one) for place, one in enumerate(base))
    check(*crossed(tmp_path, {"int8": (pair, {})})["int8"])


@pytest.mark.families
def test_queries_that_sites_share(tmp_path):
    """With recency biases."""
    spec = {"shared_queries": "block", "recency_bias": True}
    folder = write_house(tmp_path / "shared", layers=4, block_size=3, attn_res=spec)
    check(*crossed(tmp_path, {"shared": (turned(folder), {})})["shared"])


NAME = "model.layers.3.mlp.down_proj.weight"


def damaged(folder: Path, kind: str) -> None:
    """Spoil a checkpoint."""
    weights, config = folder / WEIGHTS, folder / "config.json"
    tensors = load_file(weights)
    if kind == "missing":
        del tensors[NAME]
    elif kind == "nan":
        tensors[NAME][5, 7] = torch.nan
    elif kind == "misshapen":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    elif kind == "unknown":
        tensors["model.more.weight"] = torch.ones(3)
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "config":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-5}))
    elif kind == "absent":
        weights.unlink()
    else:
        save_file(tensors, weights, metadata={"format": "pt"})


DAMAGED = {
    "missing": f"lacks the tensor {NAME}",
    "nan": f"{NAME} holds nan",
    "misshapen": "model.norm.weight",
    "unknown": "model.more.weight",
    "truncated": "",
    "config": "is of another model than the one that runs",
    "absent": "",
}
TENSORS = ("missing", "nan", "misshapen", "unknown")  # that can come by themselves


@pytest.fixture(scope="module")
def life(tmp_path_factory):
    """What engines answered after each of many steps, alone and with two workers."""
    root = tmp_path_factory.mktemp("life")
    first, second = turned(write_house(root / "first", "llama", layers=4, block_size=3, seed=31))
    for kind in DAMAGED:
        damaged(shutil.copytree(second, root / kind), kind)
    refused = [["called", second], ["busy", second], ["load_model", second], ["model", second]]
    refused += [["reload_weights", root / kind] for kind in DAMAGED]
    refused += [[way, root / kind] for way in ("tensors", "transfer") for kind in TENSORS]
    refused += [["finish_weight_update"], ["draft", second]]
    taken = [["transfer", second], ["tensors", first], ["reload_weights", second]]
    prompts = fresh_prompts(LENGTHS)
    of_two = [[way, root / "nan"] for way in ("tensors", "transfer", "reload_weights")]
    jobs = [
        job(first, prompts, *refused, *taken, **RECEIVES),
        job(second, prompts),
        job(first, prompts, *of_two, *taken, **RECEIVES, **TWO),
        job(second, prompts, **TWO),
    ]
    return run_replace_jobs(jobs, root / "run")


def test_what_is_refused_leaves_the_weights(life):
    """Each says what is wrong, and what is asked then is answered as before, to the bit."""
    before, *refused = life[0][:-3]
    called, busy, other, model, *others = [step["refused"] for step in refused]
    assert "was called in a worker" in called and busy == BUSY and "not supported" in other
    assert "are not replaced one by one; call" in model
    wanted = [*DAMAGED.values(), *(DAMAGED[kind] for kind in TENSORS * 2)]
    wanted += ["is for an update that was started", "no draft model is configured"]
    for said, part in zip(others, wanted, strict=True):
        assert said and part in said and "\n" not in said
    for step in refused:
        assert [step[key] for key in ("answers", "again")] == [
            before[key] for key in ("answers", "again")
        ]


@pytest.mark.parametrize("place", [0, 2], ids=["one worker", "two workers"])
def test_every_way_of_an_update(life, place):
    """Also after what was refused, and with a prompt in the cache of earlier weights."""
    before, (wanted,) = life[place][0], life[place + 1]
    assert before["answers"] != wanted["answers"]
    for step, own in zip(life[place][-3:], (wanted, before, wanted), strict=True):
        assert step == own


def test_a_refusal_of_two_workers_leaves_no_reply(life):
    """Each call gets its own answer."""
    before, *refused = life[2][:4]
    for step in refused:
        assert DAMAGED["nan"] in step["refused"]
        assert step["answers"] == before["answers"]


def drafting(**given: Any) -> dict[str, Any]:
    speculation = {"num_speculative_tokens": 1, **given}
    return {
        "speculative_config": speculation,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        **RECEIVES,
    }


@pytest.mark.families
@pytest.mark.parametrize("base", ["deepseek_v3", "alice_ai"])
def test_the_head_of_a_checkpoint_is_replaced_with_it(base, tmp_path):
    """As many drafts are taken as in an engine that started on it."""
    prompts, folders = fresh_prompts(LENGTHS), drawn(tmp_path, base)
    for folder in folders:
        model = tiny_sites.load(folder)
        add_head(folder, base, [continued(model, prompt) for prompt in prompts])
    found = crossed(tmp_path, {base: (folders, drafting(method="mtp"))}, prompts)[base]
    check(*found, caches=False)
    assert all(step["drafts"] > 0 for engine in found for step in engine)


def of_a_model(root: Path) -> tuple[Path, Pair, str]:
    """A draft that is the model itself, and one that is another."""
    target = write_house(root / "target", layers=4, block_size=3, seed=31)
    return target, turned(shutil.copytree(target, root / "draft")), "draft_model"


def of_a_head(root: Path, prompts: list[list[int]]) -> tuple[Path, Pair, str]:
    """A head that knows the answers, and one that does not."""
    target = write_house(root / "target", layers=4, block_size=3, seed=31)
    model = tiny_sites.load(target)
    answers = [continued(model, prompt) for prompt in prompts]
    return target, turned(write_eagle(root / "head", target, answers)), "eagle"


@pytest.mark.families
@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_draft_is_replaced_alone(kind, tmp_path):
    prompts = fresh_prompts(LENGTHS)
    target, pair, method = of_a_model(tmp_path) if kind == "model" else of_a_head(tmp_path, prompts)
    jobs = [
        job(target, prompts, ["draft", other], **drafting(method=method, model=str(own)))
        for own, other in (pair, pair[::-1])
    ]
    first, second = run_replace_jobs(jobs, tmp_path / "run")
    assert [step["refused"] for step in (*first, *second)] == [None] * 4
    assert first[0]["drafts"] > second[0]["drafts"]
    assert first[0]["answers"] == second[0]["answers"]
    assert first[1] == second[0] and second[1] == first[0]
