"""``inspect --magnitudes``: RMS of outputs and mixes, against the float64 model."""

import numpy as np
import pytest
from jobs import fresh_prompts
from serving import DEMO, GOLDENS

from attnres_serve import cli
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.inspect.rows import rows_of

pytest.importorskip("vllm")

from in_process import world
from trace_cases import FAR, worker_of
from vllm.config import set_current_vllm_config

from attnres_serve.inspect import magnitudes, magnitudes_figure
from attnres_serve.verify import oracle
from attnres_serve.worker import WorkerExtension

NAMES = ("fla_transformer_full", "qwen3_attnres_cumulative_block", "nanogpt_block")


@pytest.fixture(scope="module", autouse=True)
def one_world():
    with world(GOLDENS / NAMES[0]):
        yield


def wanted(model: oracle.Model, ids: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """RMS ``[T]`` of the embedding and every sublayer's output, and of what every site reads."""
    x, y, mixes = model.embed(ids), [], []
    for site in range(model.spec.final + 1):
        mixes.append(model.mix(site, x, y)[0])
        if site < model.spec.final:
            y.append(model.sublayer(site, mixes[-1]))
    each = [[part.square().mean(-1).sqrt().numpy() for part in parts] for parts in ([x, *y], mixes)]
    return each[0], each[1]


@pytest.mark.parametrize("golden", NAMES)
def test_equals_the_float64_model(golden):
    """In chunks, with two phases; a final norm that reads no mix has none."""
    worker, model = (
        worker_of(GOLDENS / golden, "two_phase", "cpp", 16),
        oracle.load(GOLDENS / golden),
    )
    (ids,) = fresh_prompts((37,))
    with set_current_vllm_config(worker.vllm_config):
        answer = WorkerExtension.attn_res_magnitudes(worker, ids)
    assert answer["problem"] is None
    outputs, mixes = wanted(model, ids)
    assert [index for index, *_ in answer["sites"]] == list(range(model.spec.final + 1))
    for index, *parts in answer["sites"]:
        received, mixed = (np.frombuffer(part, np.float32) for part in parts)
        np.testing.assert_allclose(received, outputs[index], atol=FAR, rtol=FAR)
        if index == model.spec.final and not model.spec.final_mix:
            assert np.isnan(mixed).all()
        else:
            np.testing.assert_allclose(mixed, mixes[index], atol=FAR, rtol=FAR)
    modules = worker.model_runner.get_model().modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


ROWS = rows_of(sites(AttnResSpec.uniform(Layout.of(3), 2, 1e-6)))
DRAW = np.random.default_rng(0)
FOUND = {row.index: tuple(DRAW.uniform(1, 2, (2, 30)).astype(np.float32)) for row in ROWS}


def test_summary_and_figure(tmp_path):
    """A sublayer's output is what the next site receives; the final site has none."""
    found = magnitudes.summary(ROWS, FOUND)
    for at in range(7):
        values = FOUND[at][1].astype(float)
        np.testing.assert_allclose(
            found.mix[:, at], [values.mean(), *np.percentile(values, (10, 90))]
        )
    for at in range(6):
        values = FOUND[at + 1][0].astype(float)
        spread = [values.mean(), *np.percentile(values, (10, 90))]
        np.testing.assert_allclose(found.output[:, at], spread)
    assert np.isnan(found.output[:, 6]).all()
    table, arrays = magnitudes.table(found), magnitudes.arrays(found)
    for name in ("output_mean", "output_high", "mix_low"):
        np.testing.assert_array_equal(table[name], arrays[name])
    np.testing.assert_array_equal(arrays["mix_low"], found.mix[1])
    drawn = magnitudes_figure.draw("folder/demo", 30, found)
    assert drawn.get_suptitle() == "demo: magnitudes over depth of 30 tokens"
    for axes, values in zip(drawn.axes, (found.output, found.mix), strict=True):
        lines = {line.get_marker(): line for line in axes.lines}
        np.testing.assert_array_equal(lines["o"].get_xdata(), values[0, 0:6:2])
        np.testing.assert_array_equal(lines["s"].get_xdata(), values[0, 1:6:2])
        np.testing.assert_array_equal(lines["s"].get_ydata(), [1, 3, 5])
    for name in ("a.svg", "b.svg"):
        magnitudes_figure.write("demo", 30, found, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--magnitudes", "--prompt", "a"], "give a checkpoint right after `inspect`"),
        ([str(DEMO), "--magnitudes"], "give the prompt by --prompt TEXT"),
        ([str(DEMO), "--magnitudes", "--text", "t"], "--magnitudes does not go with --text"),
        ([str(DEMO), "--magnitudes", "--prompt", "a", "--edit", "mean"], "--edit does not go with"),
        ([str(DEMO), "--magnitudes", "--prompt", "a", "--model", "x"], "--model does not go with"),
        ([str(DEMO), "--magnitudes", "--prompt", "x = 1\n" * 999], "expected at most 1024"),
    ],
)
def test_a_refusal_is_one_sentence(words, sentence, capsys):
    assert cli.main(["inspect", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("attnres-serve: ") and err.count("\n") == 1
    assert sentence in err
