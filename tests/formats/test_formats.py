"""From a config.json to a parsed, and from that to the configuration that vLLM sees."""

import json
import pickle
import re
import sys
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoints import GOLDENS, config_of, write_fla, write_house
from facts import FACTS
from on_file import Sentence

from attnres_serve import settings
from attnres_serve.compat import source
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import fla, refused
from attnres_serve.formats.resolve import resolve
from attnres_serve.kernels.backends import BACKENDS
from attnres_serve.model import backend as backend_choice
from attnres_serve.model import config as model_config


def golden(name: str = "fla_transformer_block", **changes: Any) -> dict[str, Any]:
    return config_of(GOLDENS / name, **changes)


def named(model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


HOUSE = {
    "model_type": "attnres_llama",
    "architectures": ["AttnResLlamaForCausalLM"],
    "attn_res": {"block_size": 4},
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
}


QWEN3 = {"model_type": "attnres_qwen3", "architectures": ["AttnResQwen3ForCausalLM"]}


# --- FLA


@pytest.mark.parametrize(
    ("hidden", "ratio", "expected"),
    [
        # By hand: 64*4*2/3 = 170.67; 96*4*2/3 = 256 exactly; 97 is just above; null ratio is 4.
        (64, 4, 256),
        (96, 4, 256),
        (98, 4, 512),
        (1024, 4, 2816),
        (1024, None, 2816),
        (2048, 4, 5632),
        (1024, 2, 1536),
    ],
)
def test_fla_null_intermediate_size(hidden: int, ratio: int | None, expected: int) -> None:
    """Two thirds of hidden times ratio, up to the next multiple of 256."""
    config = golden(hidden_size=hidden, hidden_ratio=ratio, intermediate_size=None)
    assert fla.translate(config).config["intermediate_size"] == expected


@pytest.mark.parametrize(
    ("bias", "norm", "base", "eps"),
    [
        (False, False, "llama", None),
        (True, False, "qwen2", None),
        (False, True, "qwen3", 1e-5),
        (True, True, "qwen3", 1e-5),
    ],
)
def test_fla_bias_and_qk_norm_choose_the_backbone(
    bias: bool, norm: bool, base: str, eps: float | None
) -> None:
    """Per-head norms have FLA's default eps, whatever norm_eps is."""
    parsed = fla.translate(golden(qkv_bias=bias, qk_norm=norm, norm_eps=1e-3))
    assert (parsed.family, parsed.qk_norm_eps) == (base, eps)
    assert parsed.config["attention_bias"] is bias
    assert parsed.config["rms_norm_eps"] == parsed.spec.key_norm_eps == 1e-3


def test_fla_window() -> None:
    """A window holds in every layer."""
    config = fla.translate(golden(window_size=33)).config
    assert config["sliding_window"] == 33 and config["use_sliding_window"] is True
    assert config["layer_types"] == ["sliding_attention"] * 5 and config["max_window_layers"] == 0


@pytest.mark.parametrize("fused", [True, False])
def test_fla_fused_kernels(fused: bool) -> None:
    """They are FLA's default, and change no answer."""
    fusions = dict.fromkeys(("fuse_norm", "fuse_swiglu", "fuse_cross_entropy"), fused)
    assert resolve(golden(**fusions)) == resolve(golden())


@pytest.mark.parametrize(
    ("size", "starts"), [(1, tuple(range(10))), (2, (0, 2, 4, 6, 8)), (6, (0, 6)), (12, (0,))]
)
def test_fla_block_sizes_count_sublayers(size: int, starts: tuple[int, ...]) -> None:
    """Five layers are ten sublayers; larger than that is one block."""
    assert fla.translate(golden(attnres_block_size=size)).spec.block_starts == starts


@pytest.mark.parametrize(
    "changes",
    [
        # Odd, not positive, or no whole number.
        *({"attnres_block_size": size} for size in (3, 5, 0, -2, -1, True, False)),
        *({"attnres_block_size": size} for size in ("4", "", 4.0, [4], {})),
        {"num_heads": 3},
        {"num_kv_heads": 0},
        {"num_heads": 4, "num_kv_heads": 3},
        {"intermediate_size": None, "hidden_ratio": "4"},
        {"qk_norm": 1},
        {"norm_eps": float("nan")},
        {"hidden_act": "gelu"},
        {"rope_theta": -1.0},
        {"rope_scaling": {"factor": 2.0}},
        {"window_size": 0},
    ],
    ids=str,
)
def test_fla_values_that_are_refused(changes: dict[str, Any], sentence: Sentence) -> None:
    """A value that FLA itself could not run is named, not passed on."""
    sentence.raises(CheckpointError, resolve, golden(**changes))


# --- house


@pytest.mark.parametrize("base", [name for name in FAMILIES if not FACTS[name].is_tiny])
def test_house_bases(base: str) -> None:
    """Each family is recognised and its configuration passed on untouched."""
    architectures = [FAMILIES[base].architecture]
    config = HOUSE | {"model_type": f"attnres_{base}", "architectures": architectures}
    before = deepcopy(config)
    parsed = resolve(config)
    assert parsed is not None and config == before
    assert (parsed.format, parsed.family, parsed.qk_norm_eps) == ("house", base, None)
    assert parsed.config == without(config, "attn_res")
    assert parsed.spec == AttnResSpec(Layout.of(3), (0, 4), 1e-5)


def test_house_epsilon_of_the_heads_norms() -> None:
    """FLA's per-head norms have an epsilon of their own, and so may the house format's."""
    assert resolve(HOUSE | QWEN3 | {"qk_norm_eps": 1e-5}).qk_norm_eps == 1e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "attnres_falcon"},
        {"model_type": "attnres_"},
        {"architectures": ["LlamaForCausalLM"]},
        {"architectures": ["AttnResQwen3ForCausalLM"]},
        {"architectures": []},
        {"architectures": "LlamaForCausalLM"},
        {"architectures": ...},
        {"attn_res": ...},
        {"attn_res": {"block_size": 4, "unit": "layers"}},
        {"attn_res": {"block_size": True}},
        {"attn_res": 4},
        {"num_hidden_layers": ...},
        {"hidden_size": ...},
        {"qk_norm_eps": 1e-5},
        *(QWEN3 | {"qk_norm_eps": eps} for eps in (0, True, "1e-5")),
        {"attn_res_window": 4},
        {"attnres_block_size": 2},
    ],
    ids=str,
)
def test_house_configs_that_are_refused(changes: dict[str, Any], sentence: Sentence) -> None:
    """Each part of a house configuration that does not fit is named; ... leaves a key out."""
    config = {key: value for key, value in (HOUSE | changes).items() if value is not ...}
    sentence.raises(CheckpointError, resolve, config)


def test_house_odd_blocks_are_allowed() -> None:
    """Only FLA wants even sizes; the house format takes any."""
    assert resolve(HOUSE | {"attn_res": {"block_size": 3}}).spec.block_starts == (0, 3)


# --- recognised, not served


PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4}
REFUSED: dict[str, dict[str, Any]] = {
    "qwen3_attnres with another architecture": golden(
        "qwen3_attnres_block", architectures=["Qwen3AttnResModel"]
    ),
    "qwen3_ar by its architecture alone": named("qwen3", "Qwen3ARForCausalLM"),
    "torchtitan on another base": named("qwen3_moe", "Qwen3BlockAttnResForCausalLM"),
    "delta attention residuals": named("qwen3_dar", "Qwen3DARForCausalLM"),
    "torchtitan on Kimi Linear, which vLLM would take for its own": {
        "model_type": "kimi_linear",
        "architectures": ["KimiBlockAttnResForCausalLM", "KimiLinearForCausalLM"],
        "attn_res_num_blocks": 9,
    },
    "Inkling 2": {"model_type": "inkling2", "n_layers_per_attnres_block": 6},
    **{key: PLAIN | {key: 6} for key in refused.BLOCK_KEYS},
    "an architecture that is no list, of another": {
        "model_type": "qwen3",
        "architectures": "Qwen3ARForCausalLM",
    },
    "FLA's class without the flag": golden(
        model_type="stickbreaking_attn", architectures=["StickBreakingAttentionForCausalLM"]
    ),
    "SANA-Video 2": {"_class_name": "SanaVideo2Transformer3DModel", "attn_res_block_size": 8},
    "Megatron": PLAIN | {"attn_res_block_layers": 3},
    "nanogpt": {
        "model_type": "nanogpt",
        "architectures": ["NanoGPTForCausalLM"],
        "attn_res_block_size": 4,
        "auto_map": {"AutoConfig": "configuration_nanogpt.NanoGPTConfig"},
    },
    "house dictionary on a plain llama": PLAIN | {"attn_res": {"block_size": 4}},
    "another FLA model": golden(model_type="gla", architectures=["GLAForCausalLM"]),
    "an FLA model whose layer vLLM has": golden(model_type="mla", architectures=["MLAForCausalLM"]),
    "FLA without an architecture": without(golden(), "architectures"),
}


def test_every_class_of_fla_with_the_flag_is_named() -> None:
    spec = find_spec("fla")
    assert spec is not None and spec.origin is not None
    configs = (Path(spec.origin).parent / "models").glob("*/configuration_*.py")
    texts = [path.read_text() for path in configs]
    flagged = {
        name
        for text in texts
        if "attnres_block_size: int" in text
        for name in re.findall(r"""model_type = ['"](\w+)""", text)
    }
    named = set(refused.FLA_MIXERS) - {"stickbreaking_attn"}  # which has no flag
    assert len(flagged) > 20 and flagged - {*fla.CLASSES} == named


@pytest.mark.parametrize("name", REFUSED)
def test_recognised_but_unsupported(name: str, sentence: Sentence) -> None:
    """Not served as a plain model, which would give wrong numbers."""
    sentence.raises(CheckpointError, resolve, REFUSED[name])


@pytest.mark.parametrize("imported", [True, False])
@pytest.mark.parametrize(
    ("config", "listed"),
    [
        ({"model_type": "inkling2", "architectures": ["Inkling2ForCausalLM"]}, True),
        ({"model_type": "inkling2_text", "architectures": "Inkling2ForCausalLM"}, True),
        ({"model_type": "qwen3", "architectures": ["Qwen3ARForCausalLM"]}, True),
        ({"model_type": "inkling2", "architectures": ["AnotherForCausalLM"]}, False),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, False),
    ],
    ids=str,
)
def test_a_variant_is_left_to_a_vllm_that_lists_it(
    config: dict[str, Any], listed: bool, imported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its table of models, or by the text of it; never as a plain model."""
    config = config | {"n_layers_per_attnres_block": 6}
    table = ("Inkling2ForCausalLM", "Qwen3ARForCausalLM", "LlamaForCausalLM")
    models = SimpleNamespace(ModelRegistry=SimpleNamespace(models=dict.fromkeys(table)))
    monkeypatch.setitem(
        sys.modules, "vllm.model_executor.models.registry", models if imported else None
    )
    monkeypatch.setattr(source, "_source", lambda _: "".join(f'    "{n}": (),\n' for n in table))
    if listed:
        assert resolve(config) is None
        return
    with pytest.raises(CheckpointError):
        resolve(config)


def test_what_the_installed_vllm_lists() -> None:
    pytest.importorskip("vllm")
    assert source.lists_architecture("LlamaForCausalLM")
    assert not source.lists_architecture("Inkling2ForCausalLM")


def test_an_architecture_that_is_no_list_is_served() -> None:
    config = golden()
    result = resolve(config | {"architectures": config["architectures"][0]})
    assert result is not None and result == resolve(config)


@pytest.mark.parametrize("model_type", ["kimi_linear", "kimi_k3"])
def test_kimi_is_left_to_vllm(model_type: str) -> None:
    """vLLM serves these itself; the plugin must not stand in the way."""
    assert resolve({"model_type": model_type, "attn_res_block_size": 8}) is None


@pytest.mark.parametrize(
    "config",
    [
        {},
        PLAIN,
        PLAIN | {"attn_res_block_size": None, "attnres_mode": None},
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
        golden(auto_map={"AutoConfig": "configuration_foo.FooConfig"}),
        without(golden(architectures=["FooForCausalLM"]), "attnres_block_size"),
        golden(architectures=["TransformerModel"], attnres_block_size=None),
        without(golden(), "attnres_block_size"),
        {"model_type": "transformer"},
        {"model_type": "transformer", "architectures": ["TransformerForCausalLM"], "d_model": 8},
    ],
    ids=repr,
)
def test_not_ours(config: dict[str, Any]) -> None:
    """Plain models, and foreign repositories under the name `transformer`, are none of ours."""
    assert resolve(config) is None
    assert resolve(config, trusts_code=True) is None


def test_own_code_is_left_alone_only_when_it_will_run(sentence: Sentence) -> None:
    """With trust_remote_code a repository computes its own AttnRes; without it vLLM would not."""
    config = REFUSED["nanogpt"]
    assert resolve(config, trusts_code=True) is None
    sentence.raises(CheckpointError, resolve, without(config, "auto_map"), trusts_code=True)


# --- configurations


def built(config: dict[str, Any]):
    return model_config.build(resolve(config), "some/where")


@pytest.mark.parametrize(
    ("config", "cls"),
    [
        (golden(), "LlamaConfig"),
        (golden(qkv_bias=True), "Qwen2Config"),
        (golden("fla_transformer_full"), "Qwen3Config"),
        (HOUSE, "LlamaConfig"),
    ],
    ids=["fla llama", "fla qwen2", "fla qwen3", "house"],
)
def test_build(config: dict[str, Any], cls: str) -> None:
    """Class, architecture and the normalised specification of the configuration that vLLM sees."""
    parsed, result = resolve(config), built(config)
    assert type(result).__name__ == cls
    assert result.model_type == FAMILIES[parsed.family].hf
    assert result.attn_res_config.items() >= without(parsed.config, "model_type").items()
    assert result.attn_res_config["model_type"] == f"attnres_{parsed.family}"
    assert result.architectures == [FAMILIES[parsed.family].architecture]
    assert result.attn_res == parsed.spec.to_house()
    assert set(result.attn_res) == {"block_starts", "key_norm_eps"}
    assert model_config.spec_of(result) == parsed.spec
    assert result.attn_res_format == parsed.format
    assert result.attn_res_qk_norm_eps == parsed.qk_norm_eps
    assert result.name_or_path == "some/where"
    assert result.hidden_size == 64 and result.vocab_size == 320
    assert result.rms_norm_eps == parsed.config["rms_norm_eps"]


def test_build_without_attnres() -> None:
    """The standard-residual twin has no specification."""
    for config in (golden(attnres_block_size=None), HOUSE | {"attn_res": None}):
        result = built(config)
        assert result.attn_res is None and model_config.spec_of(result) is None


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDENS.iterdir()))
def test_configurations_survive_pickling_and_json(name: str) -> None:
    """vLLM's engine core unpickles the configuration; Hugging Face writes it as JSON."""
    result = built(golden(name))
    copy = pickle.loads(pickle.dumps(result))
    assert type(copy) is type(result) and copy == result
    assert model_config.spec_of(copy) == model_config.spec_of(result)
    written = json.loads(result.to_json_string(use_diff=False))
    for key in ("attn_res", "attn_res_format", "attn_res_qk_norm_eps", "architectures"):
        assert written[key] == getattr(result, key)
    assert json.loads(result.to_json_string())["attn_res"] == result.attn_res
    again = type(result).from_dict(written)
    assert again.attn_res == result.attn_res and again.rms_norm_eps == result.rms_norm_eps


def test_compile_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes the graph changes the key of vLLM's compile cache; nothing else does.

    A block size or an algorithm that shared the key would run another model's compiled graph.
    """
    from in_process import vllm_config

    from attnres_serve import plugin

    plugin.register()
    folder = tmp_path / "model"  # always the same one, so that the path plays no part

    def engine_config(**additional_config: str) -> Any:
        return vllm_config(folder, max_model_len=64, additional_config=additional_config)

    def compile_hash(**additional_config: str) -> str:
        return engine_config(**additional_config).compute_hash()

    options: list[dict[str, Any]] = [
        {"writer": write_fla, "block_size": 2},
        {"writer": write_fla, "block_size": 1},
        {"writer": write_fla, "block_size": 4},
        {"writer": write_fla, "block_size": None},
        {"writer": write_fla, "block_size": 2, "qk_norm": True},
        {"writer": write_house, "block_starts": [0, 3]},
        {"writer": write_house, "block_starts": [0, 3], "key_norm_eps": 1e-2},
        {"writer": write_house, "block_starts": [0, 3], "final_mix": False},
        *(
            {"writer": write_house, "block_starts": [0, 3], "attn_res": attn_res}
            for attn_res in ({"cumulative": True}, {"recency_bias": True}, {"logit_scale": 0.5})
        ),
    ]
    hashes = []
    for option in options:
        option.pop("writer")(folder, layers=4, **option)
        hashes.append(compile_hash())
    assert len(set(hashes)) == len(options)
    write_fla(folder, layers=4, block_size=2, seed=5)
    assert compile_hash() == hashes[0], "other weights, the same graph"
    algorithms = [compile_hash(attnres_algorithm=name) for name in settings.ALGORITHMS]
    backends = [compile_hash(attnres_backend=name) for name in BACKENDS]
    keys = {*algorithms, *backends}
    assert len(keys) == len(algorithms) + len(backends)
    monkeypatch.setattr(backend_choice, "_fastest", lambda _: "torch")  # which asks all workers
    chosen = engine_config()  # what auto comes to is a choice like any other
    backend_choice.choose(chosen)
    assert chosen.compute_hash() == backends[BACKENDS.index("torch")]
