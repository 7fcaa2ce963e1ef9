"""What vLLM does to a model besides running it: LoRA, new weights, INT8, a KV connector.

Each is compared with a float64 model for which it makes no difference: adapters merged into the
weights, the unquantised sites.
"""

from pathlib import Path
from statistics import fmean

import pytest
from adapters import WEIGHTS, copy_with, linear_layers, write_adapter, write_merged
from checkpoints import GOLDENS, computes_int8, quantised, write_house
from goldens import check_answers, check_job, expected
from jobs import engine_job, fresh_prompts, run_engine, run_verify, verify_job
from safetensors.torch import load_file
from serving import FAMILY_GOLDENS

from attnres_serve.settings import ALGORITHMS
from attnres_serve.verify.oracle import load
from tests.end_to_end.test_parallel import KINDS, sharded

pytestmark = pytest.mark.engine

SHAPE = {"layers": 4, "block_size": 3, "seed": 21}


def check_results(jobs: list[dict], results: list[dict], checkpoint: Path) -> None:
    model = load(checkpoint)
    for job, result in zip(jobs, results, strict=True):
        check_answers(model, job, result)


@pytest.mark.versions
@pytest.mark.parametrize(
    "algorithms",
    [["two_phase"], pytest.param(["single_pass"], marks=pytest.mark.exhaustive)],
)
def test_lora(algorithms, tmp_path):
    """An adapter equals the weights it is merged into, of a layer of ours among vLLM's.

    Requests with and without it run in one batch, and each has its own model's answers.  Another
    one answers in its place once it is loaded, beside what the cache has of the first.
    """
    base = write_house(tmp_path / "base", "gated_llama", dtype="float32", **SHAPE)
    layers = [*linear_layers(load_file(base / WEIGHTS)), "lm_head", "model.embed_tokens"]
    merged = write_merged(tmp_path / "adapter", base, layers)
    tensors = write_adapter(tmp_path / "other", load_file(base / WEIGHTS), layers, seed=4)
    other = copy_with(tmp_path / "other-merged", base, tensors)
    prompts = fresh_prompts((9, 150))
    options = {"enable_lora": True, "max_lora_rank": 8, "again": tmp_path / "other"}
    jobs = [
        engine_job(base, prompts, algorithm, lora=tmp_path / "adapter", **options)
        for algorithm in algorithms
    ]
    results = run_engine(jobs, tmp_path / "run")["results"]
    assert (load(base).logprobs(prompts[0]) - load(merged).logprobs(prompts[0])).abs().max() > 0.1
    check_results(jobs, results, merged)
    for job, result in zip(jobs, results, strict=True):
        beside = result["beside"]
        for model, rows in ((merged, beside[: len(prompts)]), (base, beside[len(prompts) :])):
            check_answers(load(model), job, {"alone": rows, "batch": rows})
        refused = result["again"].pop("refused")
        number = refused.pop("another name")
        assert "'another' has the number 1, which is that of 'adapter'" in number
        for said in refused.values():
            assert "'adapter' has other files in" in said and "\n" not in said
        for model, name in ((other, "in place"), (merged, "another number")):
            rows = result["again"][name]
            check_answers(load(model), job, {"alone": rows, "batch": rows})


@pytest.mark.families
def test_an_adapter_with_sharded_sites(tmp_path):
    """To the bit what it gives with whole ones, also where workers divide it in another way."""
    base = write_house(tmp_path / "base", "llama", dtype="float32", **SHAPE)
    merged = write_merged(tmp_path / "adapter", base, linear_layers(load_file(base / WEIGHTS)))
    options = {"enable_lora": True, "max_lora_rank": 8, "tensor_parallel_size": 2}
    options |= {"distributed_executor_backend": "mp"}
    prompts, lora = fresh_prompts((9, 150)), tmp_path / "adapter"
    jobs = []
    for fully in (False, True):
        more = options | {"fully_sharded_loras": fully}
        whole = engine_job(base, prompts, "two_phase", chunk=47, lora=lora, **more)
        jobs += [whole, sharded(whole)]
    results = run_engine(jobs, tmp_path / "run")["results"]
    for whole, divided in (results[:2], results[2:]):
        assert [whole[kind] for kind in KINDS] == [divided[kind] for kind in KINDS]
    check_results(jobs, results, merged)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_a_bias_for_every_source(backend, tmp_path):
    """Random ones, and sources that are not read, compiled, by both algorithms."""
    model = write_house(tmp_path / "x", attn_res={"source_bias": True}, dtype="float32", **SHAPE)
    jobs = [
        engine_job(model, fresh_prompts((9, 150)), algorithm, "compiled", backend=backend)
        for algorithm in ALGORITHMS
    ]
    check_results(jobs, run_engine(jobs, tmp_path / "run")["results"], model)


@pytest.mark.parametrize(
    ("mode", "algorithms"),
    [
        ("eager", ["two_phase"]),
        pytest.param("compiled", ALGORITHMS, marks=pytest.mark.exhaustive),
    ],
)
def test_weights_that_are_replaced_in_a_running_engine(mode, algorithms, tmp_path):
    """Nothing of the first weights is left in a model, no folded query either."""
    first = write_house(tmp_path / "first", "llama", **SHAPE)
    second = write_house(tmp_path / "second", "llama", **SHAPE | {"seed": 22})
    jobs = [
        engine_job(first, fresh_prompts((9, 150)), algorithm, mode, reload=second)
        for algorithm in algorithms
    ]
    check_results(jobs, run_engine(jobs, tmp_path / "run")["results"], second)


@computes_int8
@pytest.mark.parametrize(
    "algorithms", [["two_phase"], pytest.param(ALGORITHMS, marks=pytest.mark.exhaustive)]
)
def test_sites_of_a_quantised_model(algorithms, tmp_path):
    """INT8 changes what sublayers compute, and not what sites make of it."""
    # Sizes that vLLM's INT8 kernels for AMX refuse: those take no float32.
    base = write_house(tmp_path / "base", "llama", hidden=136, intermediate=272, **SHAPE)
    served = quantised(tmp_path / "int8", base)
    ask = served, base, fresh_prompts((40,))
    jobs = [verify_job(*ask, attnres_algorithm=algorithm) for algorithm in algorithms]
    for report in run_verify(jobs, tmp_path / "run"):
        wrong = set(report["parts"])
        assert wrong == {
            f"the {kind} of layer {i}" for kind in ("attention", "MLP") for i in range(4)
        }
        # Quantised, not broken.  A step of INT8 is 1/127 of the largest number of a row, which is
        # about 3.5 times the usual one, and rounding to steps is off by 0.29 of one: by 0.8 % for
        # inputs and for weights, 1.1 % for a product, 2 % for the two or three of a sublayer, and
        # a worst token has twice that.
        assert max(report["parts"].values()) < 0.05


# The mean KL divergence from the float model, of what INT8 and bf16 change.  It is half the
# variance of the logits' errors.  INT8 is off by 2 % a sublayer (above) and bf16 by less: 6 %
# through ten, of logits with a spread of five 0.3, thus 0.05; twice the error is allowed.  Scales
# that nothing filled make it no number, and a bias of 5 that is left out makes it larger than 1.
INT8_BOUND = 0.2


@computes_int8
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["fla_transformer_block", "qwen3_attnres_cumulative_block"])
def test_answers_of_quantised_models(name, tmp_path):
    """An intact INT8 checkpoint loads and answers as its float model does."""
    source = GOLDENS / name
    job = verify_job(quantised(tmp_path / name, source), source, fresh_prompts((9, 40)))
    (answer,) = run_verify([job | {"dtype": "bfloat16"}], tmp_path / "run")
    assert fmean(answer) < INT8_BOUND


BLOCK, LATENT, EXPERTS = (
    GOLDENS / "fla_transformer_block",
    FAMILY_GOLDENS / "deepseek_v3",
    FAMILY_GOLDENS / "qwen3_moe",
)


@pytest.mark.parametrize(
    ("golden", "mode", "size"),
    [
        (BLOCK, "eager", 32),
        pytest.param(BLOCK, "compiled", 32, marks=pytest.mark.exhaustive),
        pytest.param(LATENT, "eager", 16, marks=pytest.mark.families),
        pytest.param(EXPERTS, "eager", 64, marks=pytest.mark.families),
    ],
    ids=("dense", "compiled", "latent", "experts"),
)
def test_an_engine_loads_what_another_has_stored(golden, mode, size, tmp_path):
    """By vLLM's example of a KV connector, whole blocks before the last token of a prompt."""
    cases = expected(golden)
    prompts = [case["prompt"] for case in cases]
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    job = engine_job(
        golden,
        prompts,
        "two_phase",
        mode,
        prompt_logprobs=False,  # such a request loads nothing
        block_size=size,
        disable_log_stats=False,
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
        kv_transfer_config=connector,
    )
    before = [len(prompt) - 1 for prompt in prompts]
    # Where nothing is behind a block, vLLM's example looks for what it has not stored.
    blocks = [tokens // size * size if tokens % size else 0 for tokens in before]
    alone, again = sum(blocks), sum(blocks) + 2 * max(blocks)
    results = run_engine([job, job], tmp_path)["results"]
    for result, loaded in zip(results, (again, alone + again), strict=True):
        check_job(result, cases)
        assert result["counters"]["vllm:external_prefix_cache_hits"] == loaded
