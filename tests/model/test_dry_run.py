"""Models of vLLM's classes in this process: every site must run, every tensor must arrive.

No engine: a world of one process, a model without KV cache.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import INT8, quantised, write_fla, write_house, write_mode, write_nanogpt
from safetensors.torch import load_file

pytest.importorskip("vllm")

import in_process
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.utils import PPMissingLayer

from attnres_serve.checkpoints.check import describe
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.compat import decoder, device
from attnres_serve.compat.device import Kind
from attnres_serve.compat.workarounds import malloc
from attnres_serve.depth.layout import Layout
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.kernels.interface import MASKED
from attnres_serve.model import dry_run, replacing
from attnres_serve.model.dry_run import run_dry
from attnres_serve.model.site_norm import SiteNorm, SiteOrderError, recorded_sites

# Those whose norms have the usual names; test_families serves the others.
NAMES = tuple(
    name for name, one in FAMILIES.items() if one.layout({"num_hidden_layers": 1}) == Layout.of(1)
)
# One of each kind; the others are tested where all families are.  Qwen2 and Qwen3 are served in
# ``end_to_end/test_engine``.
ALWAYS = ["llama", "qwen3_moe", "deepseek_v3", "gemma", "granite", "kimi_linear"]
OTHERS = [name for name in NAMES if name not in ALWAYS]
BASES = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.families) for name in OTHERS)]
LAYERS = 3  # seven sites, the final one included; blocks of four sublayers
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A world of one process, and the folders of the checkpoints."""
    root = tmp_path_factory.mktemp("models")
    for base in NAMES:
        write_house(root / base, base, layers=LAYERS, block_size=4)
    write_house(root / "unmixed", layers=LAYERS, block_size=4, final_mix=False)
    write_fla(root / "fla", layers=LAYERS)
    write_fla(root / "qk_norm", layers=LAYERS, qk_norm=True)
    write_nanogpt(root / "nanogpt", layers=LAYERS, block_size=2, bias=True, tie=False)
    write_fla(root / "standard", layers=LAYERS, block_size=None)
    write_mode(root / "open", layers=LAYERS, num_blocks=2, cumulative=True)
    shared = {"shared_queries": "block", "recency_bias": True}
    write_house(root / "shared", layers=LAYERS, block_size=4, attn_res=shared)
    write_house(root / "biased", layers=LAYERS, block_size=4, attn_res={"source_bias": True})
    write_house(root / "tied", layers=LAYERS, block_size=4, tie=True)
    for name in ("fla", "llama", "qwen2"):
        quantised(root / f"{name}_int8", root / name)
    with in_process.world(root / "mixtral"):  # which needs a group of experts
        yield root


def vllm_config(folder: Path, algorithm: str = "single_pass", load_format: str = "auto"):
    options = {"attnres_algorithm": algorithm}
    return in_process.vllm_config(
        folder, load_format=load_format, max_model_len=64, additional_config=options
    )


@pytest.fixture
def make(world: Path) -> Iterator[Make]:
    """Models by the name of their checkpoint; the configuration stays current in the test."""
    contexts = []

    def build(name: str, algorithm: str = "single_pass") -> Any:
        config = vllm_config(world / name, algorithm)
        context = set_current_vllm_config(config)
        context.__enter__()
        contexts.append(context)
        return initialize_model(vllm_config=config)

    yield build
    for context in reversed(contexts):
        context.__exit__(None, None, None)


def norm_at(model: Any, site: int) -> tuple[Any, str]:
    """Where a site's norm is: the module that holds it, and its name there."""
    if site == 2 * LAYERS:
        return model, "norm"
    names = ("input_layernorm", "post_attention_layernorm")
    return model.layers[site // 2], names[site % 2]


def test_a_model_on_cpu_keeps_freed_memory(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr(malloc, "keep_freed", lambda: kept.append(True))
    for kind in (Kind.CPU, Kind.CUDA):
        monkeypatch.setattr(device, "kind", lambda answer=kind: answer)
        kept.clear()
        make("llama")
        assert kept == [True] * (kind == Kind.CPU)


@pytest.mark.parametrize("algorithm", ["single_pass", "two_phase"])
@pytest.mark.parametrize("base", BASES)
def test_every_site_runs(base: str, algorithm: str, make: Make) -> None:
    """A model builds, each norm is a site, and vLLM's own forward runs them all in order."""
    model = make(base, algorithm)
    assert sorted(model.attn_res_sites) == list(range(2 * LAYERS + 1))
    for index, site in model.attn_res_sites.items():
        owner, name = norm_at(model.model, index)
        assert getattr(owner, name) is site and isinstance(site, SiteNorm)
        assert site.site.index == index and site.context.algorithm == algorithm
    with torch.no_grad(), dry_run._stubbed_sublayers(model.model), recorded_sites() as ran:
        decoder.forward_one_token(model.model, model.model.norm.weight)
    assert ran == list(range(2 * LAYERS + 1))
    # The stubs are gone, and the dry run is not among the passes that are counted.
    assert not any("forward" in vars(module) for module in model.modules())
    executed = model.attn_res_executed()
    assert all(count == 0 for row in executed.values() for count in row.values())


@pytest.mark.parametrize("name", ["qwen2", "unmixed", "standard"])
def test_check_counts_the_bytes_of_vllm(name: str, make: Make, world: Path) -> None:
    """``attnres-serve check`` counts headers; the model in vLLM has as many parameters."""
    facts = describe(check_folder(world / name))
    parameters = dict(make(name).named_parameters())
    own = [parameters[n] for n in parameters if n.endswith((".query", ".key_norm"))]
    assert sum(p.numel() for p in parameters.values()) == facts["parameters"]
    assert sum(p.numel() * p.element_size() for p in own) == 4 * facts["attnres_parameters"]


@pytest.mark.parametrize("base", BASES)
def test_building_a_model_runs_it_dry(
    base: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder layer of vLLM's that changes its convention is found when the model is built."""
    layer_class = type(make(base).model.layers[0])
    monkeypatch.setattr(layer_class, "forward", without_mlp_norm)
    with pytest.raises(SiteOrderError):
        make(base)


@pytest.mark.parametrize("base", BASES)
def test_a_plain_norm_in_the_place_of_a_site(base: str, make: Make) -> None:
    """Whichever site is lost, the sentence names it."""
    model = make(base)
    for index, site in model.attn_res_sites.items():
        owner, name = norm_at(model.model, index)
        setattr(owner, name, RMSNorm(64))
        with pytest.raises(SiteOrderError) as caught:
            run_dry(model.model, model.attn_res_sites)
        kind = "MLP" if index % 2 else "attention"
        final = index == 2 * LAYERS
        place = "the final norm" if final else f"the {kind} of layer {index // 2}"
        sentence = str(caught.value)
        assert f"the site before {place} did not run" in sentence
        assert "residual convention" in sentence
        assert "\n" not in sentence and len(sentence) < 400
        setattr(owner, name, site)


def without_mlp_norm(self, positions, hidden_states, residual, *rest, **kwargs):
    """A decoder layer's forward that leaves out its second norm."""
    if residual is None:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
    else:
        hidden_states, residual = self.input_layernorm(hidden_states, residual)
    hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
    return self.mlp(hidden_states), residual


@pytest.mark.parametrize("base", BASES)
def test_a_decoder_that_skips_its_final_norm(
    base: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last mix is not the decoder layers' business, and is missed all the same."""
    model = make(base)

    def forward(self, input_ids, positions, received, inputs_embeds=None):
        hidden, residual = inputs_embeds, None
        for layer in self.layers:
            (name,) = signature(layer.forward).parameters.keys() & {"positions", "position_ids"}
            hidden, residual = layer(hidden_states=hidden, residual=residual, **{name: positions})
        return hidden

    monkeypatch.setattr(type(model.model), "forward", forward)
    with pytest.raises(SiteOrderError, match="the site before the final norm did not run") as info:
        run_dry(model.model, model.attn_res_sites)
    assert "residual convention" in str(info.value)


# --- weights

QUERY = "model.layers.1.mlp_res_proj.weight"
FINAL_NORM = "model.output_attn_res_norm.weight"
ONE_LAYER_MORE = f"model.layers.{LAYERS}.self_attention_res_proj.weight"


def weights(world: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(world / name / "model.safetensors")


@pytest.fixture
def loaded(make: Make, world: Path) -> Callable[[str], tuple[Any, dict[str, torch.Tensor]]]:
    """Models by the name of their checkpoint, and the tensors that they have loaded."""

    def load(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
        model, tensors = make(name), weights(world, name)
        model.load_weights(iter(tensors.items()))
        return model, tensors

    return load


def refuses(model: Any, tensors: Iterable[tuple[str, torch.Tensor]], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        model.load_weights(iter(tensors))


@pytest.mark.parametrize("name", [*BASES, "unmixed", "fla"])
def test_weights_arrive(name: str, loaded: Make) -> None:
    """Every query and key norm of the file stands, bit for bit in value, at its own site."""
    model, tensors = loaded(name)
    seen = 0
    for index, site in model.attn_res_sites.items():
        if index == 2 * LAYERS:
            stem = "model.res" if name == "fla" else "model.output_attn_res"
        else:
            kind = "mlp" if index % 2 else "attn" if name == "fla" else "self_attention"
            stem = f"model.layers.{index // 2}.{kind}_res"
        if not site.site.mixes:
            assert f"{stem}_proj.weight" not in tensors
            continue
        assert torch.equal(site.query, tensors[f"{stem}_proj.weight"].float().flatten())
        assert torch.equal(site.key_norm, tensors[f"{stem}_norm.weight"].float())
        seen += 1
    assert seen == 2 * LAYERS + (name != "unmixed")


def test_fused_weights_arrive(loaded: Make) -> None:
    """nanoGPT's queries, keys, values and gate stand where vLLM reads them, bit for bit."""
    model, tensors = loaded("nanogpt")
    for index, layer in enumerate(model.model.layers):
        for own, module in (("c_attn", "qkv_proj"), ("attn_gate", "attn_gate")):
            for leaf in ("weight", "bias"):
                found = getattr(getattr(layer.self_attn, module), leaf)
                assert torch.equal(
                    found, tensors[f"transformer.h.{index}.attn.{own}.{leaf}"].float()
                )
    site = model.attn_res_sites[3]
    assert torch.equal(site.query, tensors["transformer.h.1.attn_res_q2"].float())
    assert torch.equal(site.key_norm, tensors["transformer.h.1.attn_res_norm2.weight"].float())


@pytest.mark.parametrize(
    ("checkpoint", "name", "shape", "sentence"),
    [
        ("nanogpt", "model.layers.1.self_attn.v_proj.weight", (64, 64), "two names of one weight"),
        ("nanogpt", "transformer.h.1.attn.c_attn.weight", (190, 64), "3 parts of equal size"),
        ("nanogpt", "transformer.h.1.attn.attn_gate.weight", (64, 32), "config.json makes it"),
        # By the format's name and by the house name; the second one would win silently.
        ("fla", "model.layers.1.self_attention_res_proj.weight", (64,), "two names of one weight"),
        # Half a query is not loaded into the half of a parameter.
        ("llama", QUERY, (1, 32), rf"{QUERY}, .*\[1, 32\]; expected \[.*64\]"),
        ("llama", FINAL_NORM, (1, 32), rf"{FINAL_NORM}, .*\[1, 32\]; expected \[.*64\]"),
        # A query that has no site is refused, not dropped and not put at another site: that of a
        # layer too many has the number that the final site would have.
        ("llama", ONE_LAYER_MORE, (64,), f"{ONE_LAYER_MORE}.* no site"),
        ("llama", f"model.layers.{LAYERS}.mlp_res_norm.weight", (64,), "mlp_res_norm.* no site"),
        ("unmixed", "model.output_attn_res_proj.weight", (64,), "output_attn_res.* no site"),
        ("fla", f"model.layers.{LAYERS}.attn_res_proj.weight", (64,), "attn_res_proj.* no site"),
    ],
)
def test_a_tensor_that_has_no_place(
    checkpoint: str, name: str, shape: tuple[int, ...], sentence: str, make: Make, world: Path
) -> None:
    """Also where no folder could be judged before."""
    tensors = weights(world, checkpoint) | {name: torch.zeros(shape)}
    refuses(make(checkpoint), tensors.items(), sentence)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("llama", QUERY),
        ("llama", FINAL_NORM),
        ("fla", "model.layers.0.attn.q_proj.weight"),
        ("nanogpt", "transformer.h.1.attn.c_attn.weight"),
        ("open", "model.layers.0.attn_res_bias"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_that_is_not_finite(
    name: str, tensor: str, value: float, make: Make, world: Path
) -> None:
    tensors = weights(world, name)
    tensors[tensor].view(-1)[-1] = value
    found = rf"the tensor {re.escape(tensor)}\S* holds -?(nan|i)"
    refuses(make(name), tensors.items(), found)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_one_worker_looks_at_a_tensor(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All look at experts, of which each may read others."""
    names = [f"model.layers.{layer}.{leaf}" for layer in range(9) for leaf in ("norm", "mlp.up")]
    counts = dict.fromkeys([*names, "lm_head.weight", "mlp.experts.3.w1"], 0)
    for rank in range(workers):
        group = SimpleNamespace(world_size=workers, rank_in_group=rank)
        monkeypatch.setattr("vllm.distributed.get_world_group", lambda group=group: group)
        for name in counts:
            counts[name] += decoder.is_ours_to_look_at(name)
    assert counts.pop("mlp.experts.3.w1") == workers
    assert set(counts.values()) == {1}


def test_a_weight_that_overflows_the_served_dtype(make: Make, world: Path) -> None:
    """Queries do not: they are served in float32, whatever the model is."""
    model, tensors = make("llama"), weights(world, "llama")
    model.attn_res_dtype = torch.float16
    tensors[QUERY] = torch.full_like(tensors[QUERY], 7e4)
    model.lm_head.to(torch.float16)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    tensors["lm_head.weight"][0, 3] = 7e4
    refuses(model, tensors.items(), r"lm_head.weight holds 70000 at \[0, 3\], which is")


def test_recency_biases_arrive(loaded: Make) -> None:
    """Scalars of open-attnres, each in the last place; the final site does not mix and has none."""
    model, tensors = loaded("open")
    for index in range(2 * LAYERS):
        name = f"model.layers.{index // 2}.{'mlp' if index % 2 else 'attn'}_res_bias"
        site = model.attn_res_sites[index]
        *others, last = site.bias.tolist()
        assert last == tensors[name].float().item() != 0
        assert others == [0.0] * (site.site.num_sources - 1)
        assert site.site.cumulative
    assert model.attn_res_sites[2 * LAYERS].bias is None


def test_biases_of_sources_arrive(make: Make, loaded: Make) -> None:
    """As they are stored; one that is not finite, or that leaves out every source, is refused."""
    model, tensors = loaded("biased")
    masked = 0
    for index, site in model.attn_res_sites.items():
        kind = "mlp" if index % 2 else "self_attention"
        stem = f"layers.{index // 2}.{kind}" if index < 2 * LAYERS else "output_attn"
        assert torch.equal(site.bias, tensors[f"model.{stem}_res_bias"])
        assert len(site.bias) == site.site.num_sources
        masked += int((site.bias == MASKED).sum())
    assert masked
    name = "model.output_attn_res_bias"
    for value, says in ((-torch.inf, "holds -inf at"), (MASKED, "leaves out every source")):
        wrong = tensors | {name: torch.full_like(tensors[name], value)}
        refuses(make("biased"), wrong.items(), f"{name} {says}")


def test_shared_queries_arrive_at_every_site_of_their_block(make: Make, loaded: Make) -> None:
    """Sites 0 to 3 have the tensors of site 0, sites 4 and 5 those of site 4."""
    model, tensors = loaded("shared")
    for index, site in model.attn_res_sites.items():
        owner = "output_attn" if index == 6 else f"layers.{2 * (index // 4)}.self_attention"
        stem = f"model.{owner}_res_"
        assert torch.equal(site.query, tensors[stem + "proj.weight"].float().flatten())
        assert torch.equal(site.key_norm, tensors[stem + "norm.weight"].float())
        assert site.bias[-1] == tensors[stem + "bias"].float() and not site.bias[:-1].any()
        assert len(site.bias) == site.site.num_sources
    name = "model.layers.0.mlp_res_proj.weight"
    extra = (name, torch.zeros(1, 64))
    refuses(make("shared"), [*tensors.items(), extra], f"the AttnRes tensor {name}, for which")


@pytest.mark.parametrize("first", [True, False])
def test_a_tied_head_that_differs(first: bool, make: Make, world: Path) -> None:
    """vLLM would leave it out without a word, wherever it stands in the files."""
    tensors = list(weights(world, "tied").items())
    embedding = dict(tensors)["model.embed_tokens.weight"]
    for head, refused in ((embedding.clone(), False), (embedding + 1, True)):
        pair = [("lm_head.weight", head)]
        stream = pair + tensors if first else tensors + pair
        if refused:
            refuses(make("tied"), stream, "ties the head to the embedding")
        else:
            make("tied").load_weights(iter(stream))


def test_norms_of_queries_and_keys_have_a_separate_epsilon(make: Make) -> None:
    """FLA's is fixed; that of the other norms is in config.json."""
    for layer in make("qk_norm").model.layers:
        norms = layer.self_attn.q_norm, layer.self_attn.k_norm, layer.input_layernorm
        assert [norm.variance_epsilon for norm in norms] == [1e-5, 1e-5, 1e-6]


def test_a_site_refuses_the_state_of_any_but_the_one_before_it(make: Make) -> None:
    """While a model serves, too, when nobody records which sites run."""
    sites, zeros = make("llama").attn_res_sites, torch.zeros(1, 64)
    with torch.no_grad():
        _, state = sites[1](zeros.clone(), zeros.clone())
        with pytest.raises(SiteOrderError, match="site 3 was run after site 1 instead of after"):
            sites[3](zeros.clone(), state)


def test_standard_residuals_have_no_sites(make: Make, loaded: Make) -> None:
    """The twin without AttnRes is vLLM's plain model, and refuses a query."""
    model, tensors = loaded("standard")
    assert model.attn_res_sites == {} and model.attn_res_executed() == {}
    assert not any(isinstance(module, SiteNorm) for module in model.modules())
    extra = ("model.layers.0.attn_res_proj.weight", torch.zeros(1, 64))
    refuses(make("standard"), [*tensors.items(), extra], "attn_res_proj.* no site")


def test_undeclared_quantised_weights(make: Make, world: Path) -> None:
    """Also where no folder could be judged before: vLLM would take the integers for weights."""
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = weights(world, "llama")
    tensors[name] = tensors[name].to(torch.int8)
    refuses(make("llama"), tensors.items(), f"{name} holds I8")


@pytest.mark.parametrize("checkpoint", [*BASES, "fla", "nanogpt", "tied", "open", "qwen2_int8"])
def test_whatever_is_missing(checkpoint: str, make: Make, world: Path) -> None:
    """Also where no folder could be judged before: one tensor of every meaning, left out."""
    whole = weights(world, checkpoint)
    # The last one of each: layers of a model may be of two kinds.
    left_out = {re.sub(r"[.]\d[.]", ".", name): name for name in whole}.values()
    assert len(left_out) >= 14
    model = make(checkpoint)
    for name in left_out:
        others = [(other, tensor) for other, tensor in whole.items() if other != name]
        refuses(model, others, "the checkpoint lacks (the|a) ")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.o_proj.bias",  # vLLM would leave it out without a word
        "model.layers.1.mlp.gate_up_proj.weight",
        "unknown.weight",
    ],
)
@pytest.mark.parametrize("checkpoint", ["llama", "llama_int8"])
def test_whatever_is_left_over(name: str, checkpoint: str, make: Make, world: Path) -> None:
    """Also where no folder could be judged before; a rotary table may be there."""
    table = ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(16))
    tensors = [*weights(world, checkpoint).items(), table]
    make(checkpoint).load_weights(iter(tensors))
    more = [*tensors, (name, torch.ones(64))]
    refuses(make(checkpoint), more, f"the tensor {name}, which a llama model with 3")


@pytest.mark.parametrize(("load_format", "file"), [("hf", "pytorch_model.bin"), ("pt", "model.pt")])
def test_other_load_formats(load_format: str, file: str, world: Path, tmp_path: Path) -> None:
    """vLLM's own loader on files that are not judged before: whole, and without one tensor."""
    folder = shutil.copytree(world / "llama", tmp_path / load_format)
    (folder / "model.safetensors").unlink()
    tensors = weights(world, "llama")

    def load() -> None:
        torch.save(tensors, folder / file)
        config = vllm_config(folder, load_format=load_format)
        with set_current_vllm_config(config):
            model = initialize_model(vllm_config=config)
            get_model_loader(config.load_config).load_weights(model, config.model_config)

    load()
    left_out = "model.layers.1.input_layernorm.weight"
    del tensors[left_out]
    with pytest.raises(CheckpointError, match=f"lacks the tensor {left_out}"):
        load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_weights_of_another_type_than_vllm_reads(
    dtype: torch.dtype, make: Make, world: Path
) -> None:
    """vLLM would cast floats to integers, with scales that nothing filled."""
    tensors = weights(world, "llama_int8")
    for name in [name for name in tensors if name.endswith("o_proj.weight")]:
        tensors[name] = tensors[name].to(dtype)
        if dtype == torch.float32:
            del tensors[f"{name}_scale"]
    found = r"o_proj.weight holds F\w*, but by quantization_config vLLM reads I8"
    refuses(make("llama_int8"), tensors.items(), found)


def test_tensors_that_a_quantisation_needs(make: Make, world: Path) -> None:
    """Scales of activations are among a layer's parameters where they are static."""
    config = json.loads((world / "llama_int8" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = INT8 | {"strategy": "tensor", "dynamic": False}
    folder = shutil.copytree(world / "llama_int8", world / "llama_static", dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    needed = "vLLM needs model.layers.0.self_attn.qkv_proj.input_scale by quantization_config"
    refuses(make("llama_static"), weights(world, "llama_static").items(), needed)


def test_a_quantisation_that_names_layers_as_fla_does(make: Make, world: Path) -> None:
    """Also where no folder could be judged before."""
    model = make("fla_int8")
    ignored = ["lm_head", "model.layers.0.attn.o_proj"]
    model.attn_res_base.quantisation = model.attn_res_base.quantisation | {"ignore": ignored}
    found = "entry 'model.layers.0.attn.o_proj', which fits"
    refuses(model, weights(world, "fla_int8").items(), found)


@pytest.mark.parametrize("checkpoint", ["llama", "llama_int8"])
def test_tensors_of_other_pipeline_stages(checkpoint: str, make: Make, world: Path) -> None:
    """They may come, and need not."""
    whole = weights(world, checkpoint)
    others = ("model.layers.0.", "lm_head.", "model.norm.")
    own = {
        name: tensor
        for name, tensor in whole.items()
        if not name.startswith(others) or "_res_" in name
    }

    def stage() -> Any:
        model = make(checkpoint)
        model.model.layers[0] = model.model.norm = model.lm_head = PPMissingLayer()
        return model

    for tensors in (whole, own):
        loaded = stage().load_weights(iter(tensors.items()))
        assert "model.layers.1.mlp.down_proj.weight" in loaded
    del own["model.layers.1.input_layernorm.weight"]
    refuses(stage(), own.items(), "lacks the tensor model.layers.1.input_layernorm")


@pytest.mark.parametrize("name", ["llama", "llama_int8", "tied"])
def test_a_loaded_model_takes_no_weights_again(name: str, loaded: Make) -> None:
    """Not a part, nor all: vLLM may have made other weights of the first ones."""
    model, tensors = loaded(name)
    before = {found: tensor.clone() for found, tensor in model.state_dict().items()}
    part = {found: tensor for found, tensor in tensors.items() if "layers.1.mlp" in found}
    for again in (part, tensors):
        stream = iter([(found, torch.zeros_like(tensor)) for found, tensor in again.items()])
        with pytest.raises(SettingError, match="are loaded, and are not replaced one by one; "):
            model.load_weights(stream)
        assert len([*stream]) == len(again)  # nothing was read
    assert all(torch.equal(before[found], own) for found, own in model.state_dict().items())


def test_a_loaded_model_takes_a_checkpoint_that_was_validated(loaded: Make, world: Path) -> None:
    """Once; after a failure it expects none either."""
    model, tensors = loaded("llama")
    replacing.check_replacement(model, str(world / "llama"))
    with replacing.expecting(model):
        model.load_weights(iter(tensors.items()))
    with pytest.raises(TimeoutError), replacing.expecting(model):
        raise TimeoutError
    with pytest.raises(SettingError, match="are not replaced one by one"):
        model.load_weights(iter(tensors.items()))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"transformers_version": "4.0", "use_cache": False, "attention_dropout": 0.1}, None),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters"),
        ({"max_position_embeddings": 128}, "max_position_embeddings"),
        ({"attn_res": {"block_size": 3}}, "attn_res"),
        ({"dtype": "float16"}, "dtype"),
    ],
    ids=str,
)
def test_a_checkpoint_in_the_place_of_another(
    changes: dict[str, Any], key: str | None, make: Make, world: Path, tmp_path: Path
) -> None:
    """It must be of the same model; what wrote it and how it was trained does not matter."""
    model = make("llama")
    folder = shutil.copytree(world / "llama", tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    message = rf"is of another model .*[(]{key}[)]; start"
    with pytest.raises(CheckpointError, match=message) if key else nullcontext():
        replacing.check_replacement(model, str(folder))
