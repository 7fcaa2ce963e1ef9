"""Weights that are replaced in a running engine: refused, or exactly as in a new engine."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import write_house
from jobs import fresh_prompts, run_replace_jobs
from safetensors.torch import load_file, save_file

from attnres_serve.compat import device
from attnres_serve.compat.device import Kind
from attnres_serve.compat.workarounds import replaced_weights
from attnres_serve.compat.workarounds.replaced_weights import ASKED, BUSY, OTHERS, RELOAD
from attnres_serve.errors import SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.families.kimi_k3 import ACTIVATION

pytest.importorskip("vllm")

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

NEW_ENGINE = "; start a new engine with the new weights."


def made_up(family: str = "llama", own: dict[str, Any] | None = None, **more: Any) -> Any:
    """A configuration of vLLM's in which weights can be replaced, but for what is said."""
    config = SimpleNamespace(
        architectures=[FAMILIES[family].architecture], attn_res_config=own or {}
    )
    defaults = {
        "lora_config": None,
        "speculative_config": None,
        "kv_transfer_config": None,
        "weight_transfer_config": None,
        "load_config": SimpleNamespace(load_format="auto"),
        "parallel_config": SimpleNamespace(world_size_across_dp=1),
        "model_config": SimpleNamespace(
            hf_config=config, quantization=more.pop("quantization", None), model="started"
        ),
    }
    return SimpleNamespace(**defaults | more)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)


SOME: Any = object()
REASONS = (
    ("with a tied head, of which vLLM keeps a packed copy", {"own": {"tie_word_embeddings": True}}),
    ("with quantized weights", {"quantization": "compressed-tensors"}),
    ("with LoRA adapters", {"lora_config": SOME}),
    ("with speculative decoding", {"speculative_config": SOME}),
    ("with a KV connector, which would keep what the old ones", {"kv_transfer_config": SOME}),
    ("of several workers", {"parallel_config": SimpleNamespace(world_size_across_dp=2)}),
    *(
        (f"with --load-format {name}", {"load_config": SimpleNamespace(load_format=name)})
        for name in ("dummy", "pt", "sharded_state", "runai_streamer")
    ),
)


@pytest.mark.parametrize(("reason", "more"), REASONS, ids=[reason for reason, _ in REASONS])
def test_an_engine_whose_weights_are_not_replaced(reason: str, more: dict[str, Any]) -> None:
    found = replaced_weights.problem(made_up(**more))
    assert found is not None and found.endswith(NEW_ENGINE) and "\n" not in found
    assert found.startswith(f"weights cannot be replaced in a running engine {reason}")


def test_an_engine_whose_weights_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replaced_weights.problem(made_up()) is None
    own = {"tie_word_embeddings": False}
    safetensors = SimpleNamespace(load_format="safetensors")
    assert replaced_weights.problem(made_up(own=own, load_config=safetensors)) is None
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    assert "on a GPU, where that was never tried" in str(replaced_weights.problem(made_up()))


@pytest.mark.parametrize("name", FAMILIES)
def test_families_whose_weights_are_replaced(name: str) -> None:
    """Kimi Linear in the form of Kimi K3 alone, whose experts are not vLLM's."""
    for own in ({}, {"hidden_act": "silu"}, {"hidden_act": ACTIVATION}):
        found = replaced_weights.problem(made_up(name, own))
        is_k3 = name == "kimi_linear" and own.get("hidden_act") == ACTIVATION
        if name in ("llama", "normed_llama") or is_k3:
            assert found is None
        else:
            assert f"of {FAMILIES[name].title}, where that was not shown" in str(found)


def test_an_engine_that_receives_weights_of_a_trainer() -> None:
    replaced_weights.check_start(made_up())
    with pytest.raises(SettingError, match=r"^--weight-transfer-config is given, .*weights\.$"):
        replaced_weights.check_start(made_up(weight_transfer_config=SOME))


# Methods of a worker that read weights, or that vLLM's own start calls; on a CPU none changes them.
READ = {"compute_weight_checksums", "shutdown_weight_transfer_engine"}
READ |= {"supports_draft_weight_updates"}


def test_every_method_that_changes_weights_is_known() -> None:
    """A vLLM that has another one must be looked at."""
    named = {name for name in dir(CPUWorker) if re.search("weight|load_model|config$", name)}
    public = {name for name in named if not name.startswith("_")}
    assert public - {"initialize_from_config"} == {RELOAD, *OTHERS, *READ}


class Engine:
    """What both of vLLM's engines have, of an AttnRes model; remembers what is asked in order."""

    def __init__(self, config: Any, busy: bool = False, empties: bool = True) -> None:
        self.vllm_config, self.empties = config, empties
        self.output_processor = SimpleNamespace(has_unfinished_requests=lambda: busy)
        self.asked: list[Any] = []
        self.engine_core = SimpleNamespace(
            collective_rpc=self._rpc,
            collective_rpc_async=self._rpc_async,
            reset_prefix_cache=self._reset,
            reset_prefix_cache_async=self._reset_async,
        )

    def _rpc(self, method: Any, timeout: Any, args: Any, kwargs: Any) -> list[str]:
        self.asked.append((method, kwargs))
        return ["done"]

    def _reset(self, *_: Any) -> bool:
        self.asked.append("reset")
        return self.empties

    async def _rpc_async(self, *given: Any) -> list[str]:
        return self._rpc(*given)

    async def _reset_async(self, *_: Any) -> bool:
        return self._reset()

    def calls(self, cls: Any) -> Callable[..., Any]:
        """``collective_rpc`` of one of vLLM's engines."""
        for name in ("reset_prefix_cache", "collective_rpc"):
            setattr(self, name, getattr(cls, name).__get__(self))
        method: Any = cls.collective_rpc.__get__(self)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = method(*args, **kwargs)
            return asyncio.run(found) if asyncio.iscoroutine(found) else found

        return call


@pytest.fixture(params=[LLMEngine, AsyncLLM], ids=["sync", "async"])
def engine_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    for cls in (LLMEngine, AsyncLLM):
        for name in ("collective_rpc", "sleep"):
            monkeypatch.setattr(cls, name, getattr(cls, name))
    for patch in replaced_weights.CLIENTS * 2:  # idempotent
        patch.apply()
    return request.param


@pytest.mark.parametrize("method", OTHERS)
def test_other_ways_are_refused(method: str, engine_class: Any) -> None:
    """Before anything is sent; a model of vLLM's own takes what it took."""
    ours = Engine(made_up())
    with pytest.raises(SettingError, match=f"^{method} is not supported with AttnRes.*weights[.]$"):
        ours.calls(engine_class)(method)
    assert not ours.asked
    vllms = made_up()
    del vllms.model_config.hf_config.attn_res_config
    other = Engine(vllms)
    assert other.calls(engine_class)(method) == ["done"] and other.asked == [(method, None)]
    assert other.calls(engine_class)(RELOAD) == ["done"]
    assert other.asked[1:] == [(RELOAD, None)]


def test_the_cache_is_emptied_before_weights_are_replaced(engine_class: Any) -> None:
    """What is asked meanwhile is computed with the new ones, and may be kept."""
    engine = Engine(made_up())
    engine.calls(engine_class)(RELOAD, kwargs={"weights_path": "x"})
    assert engine.asked == ["reset", (RELOAD, {"weights_path": "x", ASKED: True})]
    engine = Engine(made_up())
    engine.calls(engine_class)("attn_res_executed")
    assert engine.asked == [("attn_res_executed", None)]


def test_weights_are_not_replaced_under_requests(engine_class: Any) -> None:
    for engine, asked in (
        (Engine(made_up(), busy=True), []),
        (Engine(made_up(), empties=False), ["reset"]),
        (Engine(made_up("mixtral")), []),
    ):
        with pytest.raises(SettingError) as caught:
            engine.calls(engine_class)(RELOAD)
        assert engine.asked == asked
        assert str(caught.value) == (replaced_weights.problem(engine.vllm_config) or BUSY)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, of an AttnRes model whose weights can be replaced; remembers what reaches it."""
    found = SimpleNamespace(vllm_config=made_up(), asked=[], expected=[])

    class Expecting:
        attn_res_base: Any = None

        def attn_res_expecting(self, name: str) -> Any:
            found.expected.append(name)
            return nullcontext()

    def own(
        self: Any, iterator: Any = None, weights_path: Any = None, of_disk: bool = True
    ) -> None:
        self.asked.append((iterator, weights_path, of_disk))

    model = Expecting()
    found.get_model = lambda: model
    monkeypatch.setattr(GPUModelRunner, RELOAD, own)
    replaced_weights.WORKERS.apply()
    replaced_weights.WORKERS.apply()  # idempotent
    found.call = GPUModelRunner.reload_weights.__get__(found)
    return found


def test_a_worker_validates_what_it_reads(runner: Any) -> None:
    runner.call(weights_path="new", attn_res_asked=True)
    runner.call(attn_res_asked=True)  # the folder that it was started with
    assert runner.expected == ["new", "started"]
    assert runner.asked == [(None, "new", True), (None, None, True)]


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ("reload_weights was called in a worker", {"weights_path": "new"}),
        ("takes no tensors", {"weights_iterator": iter([]), ASKED: True}),
        ("takes no tensors", {"is_checkpoint_format": False, ASKED: True}),
    ],
)
def test_what_a_worker_refuses(said: str, given: dict[str, Any], runner: Any) -> None:
    with pytest.raises(SettingError, match=said):
        runner.call(**given)
    runner.vllm_config = made_up("mixtral")
    with pytest.raises(SettingError, match="of Mixtral, where that was not shown"):
        runner.call(**given)
    assert not runner.asked and not runner.expected


def test_a_worker_of_another_model_takes_what_it_took(runner: Any) -> None:
    model = object()
    runner.get_model = lambda: model
    runner.call("tensors", None, False)
    assert runner.asked == [("tensors", None, False)]


def damaged(folder: Path, kind: str) -> None:
    """Spoil a checkpoint."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    if kind == "missing":
        del tensors["model.layers.3.mlp.down_proj.weight"]
    elif kind == "nan":
        tensors["model.layers.3.mlp.down_proj.weight"][5, 7] = torch.nan
    elif kind == "misshapen":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "config":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 1e-5}))
    elif kind == "absent":
        weights.unlink()
    else:
        save_file(tensors, weights, metadata={"format": "pt"})


DAMAGED = {
    "missing": "lacks the tensor model.layers.3.mlp.down_proj.weight",
    "nan": "model.layers.3.mlp.down_proj.weight holds nan",
    "misshapen": "model.norm.weight",
    "truncated": "",
    "config": "is of another model than the one that runs",
    "absent": "",
}
EXPERTS = "qwen3_moe"
SHAPE = {"layers": 4, "block_size": 3}
TYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What engines answered: of Llama before and after all steps, of a mixture of experts."""
    root = tmp_path_factory.mktemp("replaced")
    prompts = fresh_prompts((9, 150))  # the longer one is more than a block of the cache
    first = write_house(root / "first", "llama", seed=31, **SHAPE)
    second = write_house(root / "second", "llama", seed=32, **SHAPE)
    experts = write_house(root / EXPERTS, EXPERTS, seed=33, **SHAPE)
    steps = [["called", str(second)], ["busy", str(second)], ["update_weights", str(second)]]
    for kind in DAMAGED:
        damaged(shutil.copytree(second, root / kind), kind)
        steps.append([RELOAD, str(root / kind)])
    both = [[RELOAD, str(second)], [RELOAD, str(first)]]

    def job(folder: Path, dtype: str, steps: list[list[str]]) -> dict[str, Any]:
        return {"checkpoint": str(folder), "prompts": prompts, "dtype": dtype, "steps": steps}

    jobs = {EXPERTS: job(experts, "float32", [[RELOAD, str(experts)]])}
    for dtype in TYPES:
        refused = steps if dtype == "float32" else []
        jobs[dtype] = job(first, dtype, refused + both)
        jobs[f"new {dtype}"] = job(second, dtype, [])
    return dict(zip(jobs, run_replace_jobs([*jobs.values()], root / "run"), strict=True))


@pytest.mark.engine
@pytest.mark.parametrize("dtype", TYPES)
def test_replaced_weights_answer_as_a_new_engine(dtype: str, served: Any) -> None:
    """To the bit, also a prompt that is in the cache of the first weights, and back again."""
    before, (new,) = served[dtype][0], served[f"new {dtype}"]
    replaced, back = served[dtype][-2:]
    assert before["answers"] != new["answers"]
    assert replaced == new and back == before
    assert new["cached"][0] == 0 and new["cached"][1] >= 128


@pytest.mark.engine
def test_what_is_refused_leaves_the_weights(served: Any) -> None:
    before, *refused = served["float32"][:-2]
    called, busy, other, *others = [step["refused"] for step in refused]
    assert "was called in a worker" in called and busy == BUSY and "not supported" in other
    for said, part in zip(others, DAMAGED.values(), strict=True):
        assert part in said and "\n" not in said
    for step in refused:
        assert [step[key] for key in ("answers", "again")] == [
            before[key] for key in ("answers", "again")
        ]


@pytest.mark.engine
def test_packed_experts_are_not_replaced(served: Any) -> None:
    """Not even by the same files, which vLLM would read into them unpacked."""
    before, after = served[EXPERTS]
    assert "of Qwen3-MoE, where that was not shown to be exact" in after["refused"]
    assert after["answers"] == before["answers"] and after["again"] == before["again"]
