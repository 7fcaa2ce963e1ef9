"""Hugging Face's classes in float64, rewritten: a judge of every family that has one."""

from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
import tiny_sites
import torch
from checkpoints import edit, write_house, write_standard
from facts import TINY
from tiny_sites import sites_of
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, Mamba2Config, PreTrainedConfig

from attnres_serve import families
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.depth.layout import Layout
from attnres_serve.verify import compare, oracle, rewritten
from attnres_serve.verify.rewritten import Site, hugging_face
from attnres_serve.verify.rewritten.wide import wide_module

IDS = [(7 * i * i + 3 * i) % 250 + 3 for i in range(24)]
EPS_KEYS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")
# Dense, a mixture of experts, latent attention, norms of 1 + w, one sublayer a layer.
FAST = ("llama", "qwen3_moe", "deepseek_v3", "gemma2", "mamba2")
WITH_CLASS = [name for name in TINY if families.FAMILIES[name].has_hf_class]
FAMILIES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.exhaustive)
    for name in WITH_CLASS
]
# Sums in another order, in float64, and what an eps of 1e-13 still does: it moves a norm of numbers
# of size one by 1e-13, and some tens of norms with their gains by a hundred times that.
BOUND = 1e-10


def write(folder: Path, name: str, attn_res: dict | None = None, **options) -> Path:
    """A checkpoint of four layers in float32, with ordinary residuals where `attn_res` is None."""
    maker = write_standard if attn_res is None else write_house
    return maker(folder, name, layers=4, dtype="float32", **(attn_res or {}), **options)


def gap(a, b) -> float:
    return float((a.logprobs(IDS) - b.logprobs(IDS)).abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_zero_queries_give_the_untouched_class_and_others_do_not(name: str, tmp_path: Path) -> None:
    """A mean over sources is the plain stream by a factor, which norms without eps do not see."""
    eps = dict.fromkeys((key for key in EPS_KEYS if key in TINY[name]), 1e-13)
    plain = tiny_sites.load(write(tmp_path / "plain", name, changes=eps))
    blocks = {"block_size": 3}
    zero = tiny_sites.load(write(tmp_path / "zero", name, blocks, zero_queries=True, changes=eps))
    drawn = tiny_sites.load(write(tmp_path / "drawn", name, blocks, changes=eps))
    assert gap(plain, zero) < BOUND
    assert gap(plain, drawn) > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_the_plain_model_is_the_class_itself(name: str, tmp_path: Path) -> None:
    """The recompiled module computes what the imported one does, in float64 all along."""
    folder = write(tmp_path, name)
    plain = tiny_sites.load(folder)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(plain.config)]
    own = cls.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits = own(torch.tensor([IDS]), use_cache=False).logits[0].double()
    difference = (logits.log_softmax(-1) - plain.logprobs(IDS)).abs().max()
    assert 0 < difference < 1e-3  # the class rounds to float32
    assert plain.logprobs(IDS).dtype == torch.float64
    assert {p.dtype for p in plain.hf.parameters()} == {torch.float64}


CONVENTIONS = {
    "blocks": {"block_size": 3},
    "full": {"block_size": 1},
    "uneven blocks and an eps": {"block_starts": [0, 1, 4], "key_norm_eps": 1e-3},
    "cumulative with biases": {"block_size": 2, "cumulative": True, "recency_bias": True},
    "no final mix": {"block_size": 4, "final_mix": False},
    "scaled, a query a layer": {
        "block_starts": [0, 3],
        "logit_scale": 0.25,
        "shared_queries": "layer",
    },
}


@pytest.mark.parametrize(
    ("base", "convention"), [*zip(cycle(("llama", "qwen2", "qwen3", "mistral")), CONVENTIONS)]
)
def test_it_equals_the_hand_written_oracle(base: str, convention: str, tmp_path: Path) -> None:
    options = dict(CONVENTIONS[convention])
    blocks = {key: options.pop(key, None) for key in ("block_size", "block_starts")}
    write_house(tmp_path, base, **blocks, attn_res=options, head_dim=32, vocab=256, seed=3)
    assert gap(tiny_sites.load(tmp_path), oracle.load(tmp_path)) < 1e-9


def test_other_weights_give_another_model(tmp_path: Path) -> None:
    """Models are compared with copies of themselves whose weights were moved."""
    model = tiny_sites.load(write(tmp_path, "llama", {"block_size": 3}))
    for moved in ("model.embed_tokens.weight", "model.layers.1.mlp_res_proj.weight"):
        other = {name: t * (1 + (name == moved)) for name, t in model.weights.items()}
        assert gap(model, replace(model, weights=other)) > 1e-3


def passage_of(model: rewritten.Rewritten, sites: list[Site]) -> compare.Passage:
    """What a faultless engine would record."""
    layout = Layout.of(
        4, [(site.kind, site.norm.split(".")[-1]) for site in sites if not site.layer]
    )
    run = model.run(IDS, mix=model.mixed)
    normed = [model.normed(s, run.stream[0], run.outputs[:s]) for s in range(len(sites) + 1)]
    return compare.Passage(IDS, layout, [run.stream[0], *run.outputs], normed, run.logits)


@pytest.mark.parametrize("name", ["qwen3_moe", "mamba2"])
def test_an_engine_is_compared_part_by_part(name: str, tmp_path: Path) -> None:
    model = tiny_sites.load(write(tmp_path, name, {"block_size": 3}))
    sites = sites_of(name)
    passage = passage_of(model, sites)
    errors = dict(compare.part_errors(model, passage))
    assert len(errors) == 2 * len(sites) + 3 and max(errors.values()) < 1e-9
    passage.received[3] = passage.received[3] * 1.01  # the output of the third sublayer
    passage = replace(passage, logits=passage.logits * 1.01)
    wrong = {part for part, error in compare.part_errors(model, passage) if error > 1e-3}
    third = passage.layout.site_name(2)
    assert {third, "the head"} <= wrong
    assert passage.layout.site_name(1) not in wrong
    # Sites read that output from then on, and are given it here.
    assert wrong - {third, "the head"} <= {
        f"the site of {passage.layout.site_name(s)}" for s in range(3, len(sites) + 1)
    }


def test_verify_uses_it_for_families_without_a_hand_written_oracle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_house(tmp_path, "llama", block_size=3, vocab=256)
    parsed = check_folder(tmp_path).translated("it")
    assert isinstance(compare._model(tmp_path, parsed), oracle.Model)
    monkeypatch.setattr(oracle, "BASES", ())
    judge = compare._model(tmp_path, parsed)
    assert isinstance(judge, rewritten.Rewritten)
    assert gap(judge, oracle.load(tmp_path)) < 1e-9


OLMO2 = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
REFUSED = {
    "norms behind the sublayers": (
        OLMO2,
        ("post_attention_layernorm", "post_feedforward_layernorm"),
        "does more with its residual stream than to add to it before",
    ),
    "no such norms": (OLMO2, ("input_layernorm", "post_attention_layernorm"), "no attribute"),
    "norms in another order": (
        {},
        ("post_attention_layernorm", "input_layernorm"),
        "times or in another order, so that its residual stream cannot be rewritten",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_stream_that_cannot_be_rewritten_is_refused(case: str, tmp_path: Path) -> None:
    changes, norms, sentence = REFUSED[case]
    config = TINY["llama"] | changes
    own = hugging_face.config(config["model_type"], config)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(own)](own).save_pretrained(tmp_path)
    kinds = zip(("attention", "mlp"), norms, strict=True)
    sites = [Site(n, kind, f"layers.{n}.{norm}") for kind, norm in kinds for n in range(4)]
    sites.sort(key=lambda site: site.layer)
    with pytest.raises(ValueError, match=sentence):
        rewritten.load(tmp_path, sites)


def test_a_norm_left_out_is_refused(tmp_path: Path) -> None:
    """Its sublayer would read the plain stream."""
    write(tmp_path, "llama")
    sites = [
        site
        for site in sites_of("llama")
        if site != Site(2, "mlp", "layers.2.post_attention_layernorm")
    ]
    with pytest.raises(ValueError, match=r"than to add to it before layers\.3\.input_layernorm"):
        rewritten.load(tmp_path, sites)


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama", {"block_size": 3})
    with pytest.raises(ValueError, match="no model type 'bailing_moe'"):
        rewritten.load(tmp_path, sites_of("llama"), model_type="bailing_moe")
    with pytest.raises(ValueError, match="no language model of the type 'clip'"):
        rewritten.load(tmp_path, sites_of("llama"), model_type="clip")
    with pytest.raises(ValueError, match=r"misshapen tensors: .*q_norm\.weight"):
        rewritten.load(tmp_path, sites_of("llama"), model_type="qwen3")
    edit(tmp_path, attn_res={"block_size": 3, "recency_bias": True})
    with pytest.raises(ValueError, match=r"misshapen tensors: \['model\.layers\.0\.mlp_res_bias'"):
        tiny_sites.load(tmp_path)


def test_optional_kernels_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed, as Triton kernels have no float64."""
    (tmp_path / "causal_conv1d.py").write_text("def causal_conv1d_fn(*_, **__): raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    wide_module.cache_clear()
    name = "transformers.models.lfm2.modeling_lfm2"
    taken = wide_module(name).causal_conv1d_fn
    wide_module.cache_clear()
    assert taken.__module__ == name and not hasattr(taken, "__wrapped__")


def test_a_class_that_another_package_registered_is_no_judge(monkeypatch):
    class Foreign(PreTrainedConfig):
        model_type = "mamba2"

    monkeypatch.setitem(CONFIG_MAPPING._extra_content, "mamba2", Foreign)
    assert CONFIG_MAPPING["mamba2"] is Foreign
    assert type(hugging_face.config("mamba2", TINY["mamba2"])) is Mamba2Config
