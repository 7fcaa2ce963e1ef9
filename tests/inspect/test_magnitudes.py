"""``inspect --magnitudes``: RMS of outputs and mixes, against the float64 model."""

import numpy as np
import pytest
from jobs import fresh_prompts
from serving import DEMO, GOLDENS

from attnres_serve import cli
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import SettingError
from attnres_serve.inspect.rows import rows_of

pytest.importorskip("vllm")

from in_process import world
from trace_cases import FAR, worker_of
from vllm.config import set_current_vllm_config

from attnres_serve.inspect import magnitudes, magnitudes_figure
from attnres_serve.inspect.magnitudes_figure import Side
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
    drawn = magnitudes_figure.draw([Side("folder/demo", 30, found)])
    assert drawn.get_suptitle() == "demo: magnitudes over depth of 30 tokens"
    for axes, values in zip(drawn.axes, (found.output, found.mix), strict=True):
        lines = {line.get_marker(): line for line in axes.lines}
        np.testing.assert_array_equal(lines["o"].get_xdata(), values[0, 0:6:2])
        np.testing.assert_array_equal(lines["s"].get_xdata(), values[0, 1:6:2])
        np.testing.assert_array_equal(lines["s"].get_ydata(), [1, 3, 5])
    for name in ("a.svg", "b.svg"):
        magnitudes_figure.write([Side("demo", 30, found)], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_two_checkpoints_in_one_figure():
    """In the same panels and on one scale; the second has dashes, hollow marks and its name."""
    other = {row: (9 * received, mixed) for row, (received, mixed) in FOUND.items()}
    found = magnitudes.summary(ROWS, FOUND), magnitudes.summary(ROWS, other)
    sides = Side("x/a$1$", 30, found[0]), Side("x/b", 28, found[1])
    drawn = magnitudes_figure.draw(sides)
    title = "a$1$ and b: magnitudes over depth of 30 and 28 tokens"
    assert drawn.get_suptitle() == title
    for axes, name in zip(drawn.axes, ("output", "mix"), strict=True):
        for side, solid in zip(found, (True, False), strict=True):
            lines = [line for line in axes.lines if (line.get_linestyle() == "-") == solid]
            assert [line.get_marker() for line in lines] == ["o", "s", "v", "D"]
            assert {line.get_markerfacecolor() == "white" for line in lines} == {not solid}
            np.testing.assert_array_equal(lines[1].get_xdata(), getattr(side, name)[0, 1:6:2])
    assert drawn.axes[0].get_xlim()[1] > found[1].output[2, 5]
    texts = {text.get_text(): text for text in drawn.legends[0].get_texts()}
    assert {"a$1$", "b", "10 to 90 % of tokens"} < texts.keys()
    assert not texts["a$1$"].get_parse_math()
    same = magnitudes_figure.draw([Side("x/a", 30, found[0]), Side("y/a", 30, found[1])])
    assert same.get_suptitle() == "x/a and y/a: magnitudes over depth of 30 tokens"
    for made in (magnitudes.table(*found), magnitudes.arrays(*found)):
        for which, side in zip(("first", "second"), found, strict=True):
            np.testing.assert_array_equal(made[f"{which}_output_mean"], side.output[0])
            np.testing.assert_array_equal(made[f"{which}_mix_high"], side.mix[2])
        assert "output_mean" not in made and len(made["layer"]) == 7


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Layout.of(4), "a has 6 sublayers and b 8"),
        (
            Layout.of(3, (("mlp", "x"), ("attention", "y"))),
            "sublayer 0 is the attention of layer 0 in a and the MLP of layer 0 in b",
        ),
        (
            Layout.of(6, (("mixer", "norm"),)),
            "sublayer 0 is the attention of layer 0 in a and the mixer of layer 0 in b",
        ),
    ],
)
def test_other_sublayers_are_refused(other, said):
    """Norms of other names are no hindrance."""
    same = Layout.of(3, (("attention", "x"), ("mlp", "y")), "z")
    magnitudes.require_same(("a", "b"), (Layout.of(3), same))
    with pytest.raises(SettingError) as raised:
        magnitudes.require_same(("a", "b"), (Layout.of(3), other))
    assert str(raised.value) == f"{said}; expected two checkpoints with the same sublayers."


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--magnitudes", "--prompt", "a"], "give a checkpoint right after `inspect`"),
        ([str(DEMO), "--magnitudes"], "give the prompt by --prompt TEXT"),
        ([str(DEMO), "--magnitudes", "--text", "t"], "--text does not go with --magnitudes"),
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
