"""Run checkpoints through ``vllm.LLM`` in a process of its own: ``python engine.py JOBS RESULTS``.

Both are JSON files.  A job is {checkpoint, prompts, mode: eager | compiled | piecewise, algorithm
(None for a model without AttnRes), backend, chunk: tokens per step or 0, answer: tokens of one,
leaves: steps behind which another request beside the batch is aborted or 0, prompt_logprobs:
whether answers have them, options: further ones of ``vllm.LLM``, lora: folder of an adapter or
nothing, refused: folder of an adapter that is not taken or nothing, again: folder of another
one that takes its place or nothing, reload: folder whose weights take the place
of the checkpoint's or nothing, trace: whether the longest prompt is traced, edits: for another
trace of it, as workers take them, or none, puts: edits that take each other's place in the
engine, or none, counted: tokens of steps of which is counted what
workers ask of each other, or none, workaround: for a plain vLLM that is wrong without, as
module:function of ours or of the tests, or nothing, env: environment variables, settings: further
ones of ours}.
Its result holds the answers alone, in a batch and from the prefix cache, with an adapter those to
all prompts with it and then without it in one batch (``beside``), the trace, what was
compiled in pieces, and what the counters say: ours, and where ``disable_log_stats`` is false
vLLM's.  The engine lives in this process, so that a tiny checkpoint costs seconds.
"""

import gc
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from as_users import AS_USERS


def answers(
    llm,
    prompts: list[list[int]],
    length: int,
    prompt_logprobs: bool,
    lora: str | None,
    leaves: int = 0,
    bare: int = 0,
    number: int = 1,
) -> list[dict[str, Any]]:
    """Greedy tokens and logprobs for prompts, all but the first of which come a step later.

    So one is decoded in a step in which others are begun.  And with ``leaves`` one more, before all
    of them, is aborted after so many steps.  The last ``bare`` ones are asked without the adapter,
    which has a number.
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(
        temperature=0,
        max_tokens=length,
        logprobs=1,
        prompt_logprobs=0 if prompt_logprobs else None,
        ignore_eos=True,
    )
    request = LoRARequest("adapter", number, lora) if lora else None
    engine, done = llm.llm_engine, {}
    if leaves:
        engine.add_request("left", {"prompt_token_ids": prompts[-1]}, params, lora_request=request)
    for place, prompt in enumerate(prompts):
        given = {"prompt_token_ids": prompt}
        own = request if place < len(prompts) - bare else None
        engine.add_request(str(place), given, params, lora_request=own)
        if place == 0:
            done |= step(engine)
    while engine.has_unfinished_requests():
        done |= step(engine)
        leaves -= 1
        if leaves == 0:
            engine.abort_request(["left"])
            assert "left" not in done
    return [unpack(done[str(place)]) for place in range(len(prompts))]


def step(engine) -> dict[str, Any]:
    """The requests that a step finishes."""
    return {found.request_id: found for found in engine.step() if found.finished}


def unpack(request) -> dict[str, Any]:
    tokens = list(request.outputs[0].token_ids)
    steps = zip(request.outputs[0].logprobs, tokens, strict=True)
    prompt_logprobs = None
    if request.prompt_logprobs is not None:
        pairs = zip(request.prompt_logprobs[1:], request.prompt_token_ids[1:], strict=True)
        prompt_logprobs = [entry[token].logprob for entry, token in pairs]
    return {
        "prompt_logprobs": prompt_logprobs,
        "tokens": tokens,
        "logprobs": [step[token].logprob for step, token in steps],
        "cached": request.num_cached_tokens or 0,
    }


def trace(llm, ids: list[int], edits: list[Any] | None = None) -> list[list[Any]]:
    """Index, weights and RMS of every site, read as ``edits`` say."""
    asked = ids, list(range(len(ids))), list(range(10**3)), edits or []
    found = []
    for worker in llm.collective_rpc("attn_res_trace", args=asked):
        assert worker["problem"] is None, worker["problem"]
        for index, *both in worker["sites"]:
            tables = [np.frombuffer(x, np.float32).reshape(len(ids), -1).tolist() for x in both]
            found.append([index, *tables])
    return sorted(found)


def vectors(llm, ids: list[int]) -> dict[str, list[Any]]:
    """Those of every site at the first, a middle and the last token, by their names."""
    rows = [0, len(ids) // 2, len(ids) - 1]
    asked = ids, rows, list(range(10**3)), [], None, None, True
    found: dict[str, list[Any]] = {}
    for worker in llm.collective_rpc("attn_res_trace", args=asked):
        assert worker["problem"] is None, worker["problem"]
        assert not found.keys() & worker["vectors"].keys()
        for name, (shape, own) in worker["vectors"].items():
            found[name] = np.frombuffer(own, np.float32).reshape(shape).tolist()
    return found


def watch(worker) -> None:
    """Count what a worker asks of the others, and the bytes of its banks."""
    from vllm.distributed import get_tp_group

    from attnres_serve.model.bank_state import BankState

    worker.asked = asked = Counter()
    communicator, unpack = get_tp_group().device_communicator, BankState.unpack

    def counted(name):
        call = getattr(communicator, name)

        def counts(*args, **kwargs):
            asked[name] += 1
            return call(*args, **kwargs)

        return counts

    def unpacked(context, packed):
        state = unpack(context, packed)
        asked["bank"] += state.bank.nbytes
        return state

    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        setattr(communicator, name, counted(name))
    BankState.unpack = staticmethod(unpacked)


def taken(worker) -> dict[str, int]:
    """What was counted since the last call."""
    found = dict(worker.asked)
    worker.asked.clear()
    return found


def logprobs(llm, ids: list[int], edits: list[Any]) -> list[float]:
    """The logprobs of the tokens of a sequence but the first, read as ``edits`` say."""
    asked = ids, list(range(len(ids))), [], edits, ([*ids[1:], -1], 1)
    workers = llm.collective_rpc("attn_res_trace", args=asked)
    assert not any(worker["problem"] for worker in workers)
    (packed,) = (worker["predicted"] for worker in workers if worker["predicted"])
    return np.frombuffer(packed[2], np.float32)[:-1].tolist()


def lens(llm, ids: list[int], edits: list[Any], wanted: list[Any]) -> list[list[float]]:
    """The logprobs of the tokens of a sequence but the first, by each of the readings."""
    rows, sites = list(range(len(ids))), sorted({site for site, _ in wanted})
    asked = ids, rows, sites, edits, None, (wanted, [*ids[1:], -1], 1)
    workers = llm.collective_rpc("attn_res_trace", args=asked)
    assert not any(worker["problem"] for worker in workers)
    (packed,) = (worker["lens"] for worker in workers if worker["lens"])
    found = np.frombuffer(packed[2], np.float32).reshape(len(wanted), -1)
    return found[:, :-1].tolist()


def refusal(llm, name: str, number: int, folder: str, **more: Any) -> str | None:
    """Why an adapter is refused; None where it is not."""
    from vllm.lora.request import LoRARequest

    try:
        llm.llm_engine.add_lora(LoRARequest(name, number, folder, **more))
    except ValueError as error:
        return str(error)
    return None


def other_loads(llm, folder: str, other: str, ask: Callable[[int], Any]) -> dict[str, Any]:
    """Why other files are refused where nobody loads them, and answers with them where one does.

    Args:
        llm: an engine that has the adapter of ``folder`` under the number 1.
        folder, other: of two adapters.
        ask: answers with the adapter of ``folder`` by a number.
    """
    from vllm.lora.request import LoRARequest

    own = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    refused = {
        "another path": refusal(llm, "adapter", 1, other),
        "another name": refusal(llm, "another", 1, other),
    }
    for path in Path(other).iterdir():
        (Path(folder) / path.name).write_bytes(path.read_bytes())
    try:
        refused["asked"] = str(ask(1))
    except ValueError as error:
        refused["asked"] = str(error)
    llm.llm_engine.add_lora(LoRARequest("adapter", 1, folder, load_inplace=True))
    in_place = ask(1)
    for name, content in own.items():
        (Path(folder) / name).write_bytes(content)
    llm.llm_engine.remove_lora(1)
    llm.llm_engine.add_lora(LoRARequest("adapter", 2, folder))
    return {"refused": refused, "in place": in_place, "another number": ask(2)}


def run(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM
    from vllm.config import CompilationMode
    from vllm.v1.metrics.reader import Counter

    # What the job before left; not after the last one, as collecting an engine of several workers
    # can wait for ever (vLLM 0.31: for a ZeroMQ context whose sockets are collected after it).
    gc.collect()
    torch.compiler.reset()
    os.environ.update(job["env"])
    if job["workaround"]:
        module, _, function = job["workaround"].partition(":")
        if find_spec(module) is None:  # it is no module of the tests
            module = f"attnres_serve.compat.workarounds.{module}"
        mend = getattr(importlib.import_module(module), function)
        getattr(mend, "apply", mend)()
    options: dict[str, Any] = {"distributed_executor_backend": "uni"}
    if job["algorithm"]:
        chosen = {"attnres_algorithm": job["algorithm"], "attnres_backend": job["backend"]}
        options["additional_config"] = chosen | job["settings"]
    if job["chunk"]:
        options |= {"max_num_batched_tokens": job["chunk"], "max_num_seqs": 8}
    if job["mode"] == "piecewise":
        from piecewise import as_on_cuda

        compiled = as_on_cuda()
        for found in compiled:
            found.clear()
        options["compilation_config"] = {"mode": CompilationMode.VLLM_COMPILE}
    options |= job["options"]
    llm = LLM(
        job["checkpoint"],
        dtype="float32",
        max_model_len=256,
        enforce_eager=job["mode"] == "eager",
        **options,
    )
    if job["reload"]:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": job["reload"]})
    prompts, length, lora = job["prompts"], job["answer"], job["lora"]
    of_prompts = job["prompt_logprobs"]
    result: dict[str, Any] = {
        "alone": [answers(llm, [prompt], length, of_prompts, lora)[0] for prompt in prompts],
        "batch": answers(llm, prompts, length, of_prompts, lora, job["leaves"]),
    }
    if lora:
        result["beside"] = answers(llm, prompts * 2, length, of_prompts, lora, bare=len(prompts))
    longest = max(prompts, key=len)
    for _ in range(2):  # the first one fills the cache, which prompt logprobs pass by
        (result["cached"],) = answers(llm, [longest], length, False, lora)
    if job["refused"]:
        result["refusal"] = refusal(llm, "refused", 2, job["refused"])
    if job["again"]:

        def ask(number: int) -> list[dict[str, Any]]:
            return answers(llm, prompts, length, of_prompts, lora, number=number)

        result["again"] = other_loads(llm, lora, job["again"], ask)
    if job["trace"]:
        assert set(llm.collective_rpc("attn_res_untraceable")) == {None}
        result["trace"], result["vectors"] = trace(llm, longest), vectors(llm, longest)
    if job["puts"]:
        from edit_routes import changed

        def asked(prompt: list[int], of_prompt: bool) -> dict[str, Any]:
            return answers(llm, [prompt], length, of_prompt, lora)[0]

        result["puts"] = changed(llm.llm_engine, job["puts"], prompts, asked)
    if job["counted"]:
        llm.collective_rpc(watch)
        result["asked"] = []
    for tokens in job["counted"]:
        answers(llm, [longest[tokens - 1 :: -1]], 1, False, None)  # not a cached one
        result["asked"].append(llm.collective_rpc(taken))
    if job["edits"]:
        result["edited"] = trace(llm, longest, job["edits"])
        result["following"] = logprobs(llm, longest, job["edits"])
    if job["algorithm"]:
        every_worker = llm.collective_rpc("attn_res_executed")
        passes = every_worker[0]
        assert all(worker == passes for worker in every_worker)
        assert set(llm.collective_rpc("attn_res_backend")) == {job["backend"]}
        result["algorithm"], result["backend"] = job["algorithm"], job["backend"]
        result["executed"] = {name: sum(counts.values()) for name, counts in passes.items()}
        result["executed_compiled"] = {name: counts["compiled"] for name, counts in passes.items()}
    if job["mode"] == "piecewise":
        result["compiled"] = {name: [*found] for name, found in compiled._asdict().items()}
    if not options.get("disable_log_stats", True):
        counters = [found for found in llm.get_metrics() if isinstance(found, Counter)]
        result["counters"] = {found.name: found.value for found in counters}
    llm.llm_engine.engine_core.shutdown()
    return result


def inspect_here() -> None:
    """Where this was not forked, a subprocess would import vLLM anew for every class of models."""
    from vllm.model_executor.models import registry

    if not AS_USERS:
        registry._run_in_subprocess = lambda inspect: inspect()


def main(jobs: str, results: str) -> None:
    inspect_here()
    found = [run(job) for job in json.loads(Path(jobs).read_text())]
    plugin = "attnres_serve.plugin" in sys.modules
    Path(results).write_text(json.dumps({"results": found, "plugin_loaded": plugin}))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
