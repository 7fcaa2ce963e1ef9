"""Models that would be served as plain ones: refused by name, and no other one is."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, depth_attention, edit, write_standard
from facts import TINY
from on_file import Sentence
from serving import FAMILY_GOLDENS, GOLDENS

from attnres_serve.errors import CheckpointError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import connections
from attnres_serve.formats.resolve import resolve

PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64}
BARE = {"use_qk_norm": False, "scale_embeds": False}
DEPTH = "Depth-Attention (arXiv 2606.05014)"
BASELINES = ("denseformer", " Dense-Former", "densetransformer", "mHC", "deepcrossattention", True)
SISTERS: list[dict[str, Any]] = [
    *({key: one} for key in ("baseline_mode", "residual_baseline") for one in BASELINES),
    {"use_depth_attention": True},
    {"use_depth_attention": 1, "baseline_mode": None},
    {"cross_layer_mode": "depth_softmax"},
    {"depth_attention_recent_window": 4, "use_depth_attention": True},
    {"cross_layer_pattern": "all", "recurrent_model": True},
]
STRANGERS: dict[str, Any] = {
    "depth_wise_attention": True,
    "depth_window": 4,
    "cross_layer_kv": [0, 1],
    "use_residual_gate": True,
    "value_residual": 0.5,
    "residual_streams": 4,
    "no_residual": [3],
    "parallel_residual": True,
    "hyper_connections": 4,
    "hyper_rate": 2,
    "hc_mult": 4,
    "mhc_streams": 4,
    "dwa_dilation": 4,
    "use_dwa": True,
    "layer_kv_reuse_map": {"3": 1},
    "num_kv_shared_layers": 2,
    "skip_connections": [[0, 3]],
    "denseformer": True,
    "dense_connections": True,
    "num_loops": 3,
    "recurrent_model": True,
    "total_ut_steps": 4,
    "altup_num_inputs": 4,
    "deepnorm": True,
    "use_deep_norm": True,
    "rezero": True,
    "res_scale": 0.5,
    "mean_recurrence": 32,
    "num_recurrences": 4,
    "layer_sharing": 2,
    "kv_sharing": True,
    "use_shared_kv": True,
    "unet": True,
    "mixture_of_depths": True,
}
NOTHING = (None, False, 0, "", [], {}, "none")


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        resolve(config)
    return str(caught.value)


@pytest.mark.parametrize("keys", SISTERS, ids=str)
def test_sisters_are_refused_by_name(keys: dict[str, Any], sentence: Sentence) -> None:
    """Also with the norms of heads or the block size that AttnRes-3B has beside it."""
    for beside in ({}, BARE, {"attnres_block_size": 12}):
        sentence.raises(CheckpointError, resolve, PLAIN | beside | keys)


@pytest.mark.parametrize(
    "model",
    ["Depth-Attention-3B", "Depth-Attention-410M", "DenseFormer-3B", "mHC-3B", "Vanilla-3B"],
)
def test_configurations_of_its_repository(model: str, sentence: Sentence) -> None:
    """As they are stated, and with the settings that its training code writes for every model."""
    for settings in ({}, depth_attention.SETTINGS):
        sentence.raises(CheckpointError, resolve, settings | depth_attention.CONFIGS[model])


def test_idle_settings_of_its_code() -> None:
    """A model that it trained without Depth-Attention, norms or scales is a plain Llama."""
    config = depth_attention.CONFIGS["Vanilla-3B"] | depth_attention.SETTINGS
    config |= {"recurrent_model": False, "cross_layer_pattern": None}
    config |= {"cross_layer_mode": "residual"}
    for off in (False, None, 0):
        assert resolve(config | {"use_depth_attention": off, "use_qk_norm": off}) is None
    del config["use_depth_attention"]
    assert resolve(config | {"use_qk_norm": False, "depth_attention_stride": 24}) is None


def test_norms_and_scales_of_a_plain_llama() -> None:
    """Tensors tell whether there are norms; a class of another family may know the key."""
    assert "scale_embeds: True" in refusal(PLAIN | {"scale_embeds": True})
    normed = PLAIN | {"use_qk_norm": True}
    assert resolve(normed, names=lambda: ["model.layers.0.self_attn.q_proj.weight"]) is None
    with pytest.raises(CheckpointError, match="use_qk_norm: True"):
        resolve(normed, names=lambda: ["model.layers.0.self_attn.q_norm.weight"])
    glm = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    assert resolve(glm | {"use_qk_norm": True}) is None


@pytest.mark.parametrize(
    "architectures",
    [
        *(["LLaMAForCausalLM"], ["LlamaModel"], ["LlamaForSequenceClassification"]),
        *(["MistralModel"], ["InternLM3ForCausalLM"], ["LlamaForRewardModeling"], None),
    ],
)
def test_every_name_of_a_class(architectures: list[str] | None) -> None:
    config = PLAIN | {"architectures": architectures}
    assert resolve(config) is None
    assert "dwa_dilation: 4" in refusal(config | {"dwa_dilation": 4})
    assert DEPTH in refusal(config | {"use_depth_attention": True})


def test_nested_and_camel_case_keys() -> None:
    assert "dwa_dilation: 4" in refusal(PLAIN | {"text_config": {"dwa_dilation": 4}})
    for key in ("hyperConnections", "crossLayerKV", "useDepthAttention", "numLoops", "mHC", "DWA"):
        assert f"{key}: 4" in refusal(PLAIN | {key: 4})


@pytest.mark.parametrize(
    "keys",
    [
        {"use_cla": False, "cla_share_factor": 2},
        *({key: 1} for key in ("num_loops", "hc_mult", "total_ut_steps", "num_recurrences")),
        *({key: one} for key in ("residual_scale", "res_scale") for one in (0, 1, 1.0)),
        {"residual_multiplier": 0},
        *({"baseline_mode": mode} for mode in ("standard", "none", "Vanilla", "null", False)),
        *({key: 4} for key in ("mtp_depth", "num_mtp_depths", "max_tree_depth", "encoder_depth")),
        {"mup_depth": 4},
        {"depth": 32},
        {"depthwise_kernel": 4},
    ],
    ids=str,
)
def test_false_alarms(keys: dict[str, Any]) -> None:
    assert resolve(PLAIN | keys) is None


def test_a_mode_of_another_base() -> None:
    other = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    assert "'llama' and ['LlamaForCausalLM'] alone" in refusal(other | {"baseline_mode": "attnres"})


@pytest.mark.parametrize("key", STRANGERS)
@pytest.mark.parametrize("base", ["llama", "qwen3", "nemotron_h"])
def test_strangers_are_refused_with_what_would_be_served(base: str, key: str) -> None:
    family = FAMILIES[base]
    config = {"model_type": family.hf, "architectures": [family.stock_architecture]}
    message = refusal(config | {key: STRANGERS[key]})
    assert f"config.json has {key}: {STRANGERS[key]!r}" in message
    assert f"a plain {family.title} with standard residuals" in message


def test_a_key_of_another_family() -> None:
    """Granite reads a multiplier of its residuals, and Llama none; a factor of 1 says nothing."""
    scaled = {"residual_multiplier": 0.5}
    granite = {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    assert resolve(granite | scaled) is None
    assert "residual_multiplier: 0.5" in refusal(PLAIN | scaled)
    assert resolve(PLAIN | {"residual_multiplier": 1.0}) is None


@pytest.mark.parametrize("key", [*STRANGERS, "use_depth_attention", "cross_layer_pattern"])
def test_keys_that_say_nothing_are_left_alone(key: str) -> None:
    for value in NOTHING:
        assert resolve(PLAIN | {key: value}) is None


def test_depth_attention_that_is_stated_to_be_off() -> None:
    config = config_of(GOLDENS / "baseline_attnres")
    for value in (False, None, 0):
        off = {"use_depth_attention": value, "depth_attention_stride": 2}
        assert resolve(PLAIN | off) is None
        assert resolve(config | off) == resolve(config)


@pytest.mark.parametrize("key", [*connections.HARMLESS, "residual_dropout", "depth_dropout"])
def test_harmless_keys_are_left_alone(key: str) -> None:
    assert resolve(PLAIN | {key: 0.5}) is None
    house = PLAIN | {"attn_res": {"block_size": 2}, "num_hidden_layers": 2}
    house |= {"model_type": "attnres_llama", "architectures": ["AttnResLlamaForCausalLM"]}
    assert resolve(house) == resolve(house | {key: True})


def test_strangers_of_a_format_are_refused() -> None:
    """Beside its Attention Residuals a model may have no other connections."""
    for folder in GOLDENS.iterdir():
        config = config_of(folder)
        for key in ("dwa_dilation", "hyper_connections", "layer_kv_reuse_map"):
            assert f"config.json has {key}: 4" in refusal(config | {key: 4}), folder.name


@pytest.mark.parametrize("key", ["use_depth_attention", "dwa_dilation"])
def test_vllm_with_the_plugin_refuses_them(key: str, tmp_path: Path) -> None:
    """Before an engine starts.  Without the key they are served, as plain models."""
    from in_process import vllm_config

    from attnres_serve import plugin

    plugin.register()
    folder = write_standard(tmp_path)
    assert vllm_config(folder).model_config.architecture == "LlamaForCausalLM"
    edit(folder, **{key: True})
    with pytest.raises(ValueError, match=f"config.json has {key}: True, "):
        vllm_config(folder)


def test_other_architectures_are_left_to_vllm() -> None:
    for architecture in ("Gemma3nForCausalLM", "LlamaForCausalLMEagle3"):
        assert resolve({"architectures": [architecture], "altup_num_inputs": 4}) is None
    foreign = {"architectures": ["FooForCausalLM"], "model_type": "llama", "auto_map": {}}
    for keys in ({"cross_layer_mode": "x"}, {"use_depth_attention": True}, {"depth_window": 4}):
        assert resolve(foreign | keys, trusts_code=True) is None
        assert resolve(foreign | keys) is None


def test_code_of_their_own_that_vllm_does_not_run() -> None:
    """It prefers its own class of that name."""
    for keys in ({"depth_window": 4}, {"use_depth_attention": True}, {"baseline_mode": "mhc"}):
        with pytest.raises(CheckpointError, match=next(iter(keys))):
            resolve(PLAIN | {"auto_map": {}} | keys, trusts_code=True)


def test_no_false_alarm_of_what_is_served() -> None:
    for folder in (*GOLDENS.iterdir(), *FAMILY_GOLDENS.iterdir()):
        resolve(config_of(folder))
    for config in TINY.values():
        resolve({"block_attn_res_block_size": None} | config)  # which AliceAI's must state


KNOWN = [name for name, one in FAMILIES.items() if one.is_stock and one.has_hf_class]


@pytest.mark.parametrize("name", KNOWN)
def test_no_false_alarm_of_keys_that_a_class_has(name: str) -> None:
    """Whatever its value, a key that the family's class knows is not refused."""
    from attnres_serve.families import hugging_face

    family = FAMILIES[name]
    config = {"model_type": family.hf, "architectures": [family.stock_architecture]}
    written = hugging_face.config_class(family.hf)().to_dict()
    known = hugging_face.keys(family.hf) | set(written)
    resolve(config | dict.fromkeys(known - {*config, "auto_map"}, 0.5))
    resolve(written | config)


def test_every_default_of_transformers_is_left_alone() -> None:
    """Of every class that it has, with the architecture that the class is made for."""
    import transformers
    from transformers.models.auto import configuration_auto, modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    seen = 0
    for model_type, architecture in names.items():
        cls = getattr(transformers, configuration_auto.CONFIG_MAPPING_NAMES[model_type], None)
        try:
            written = cls().to_dict()
        except Exception:  # of any kind: a class whose defaults do not go together
            continue
        resolve(json.loads(json.dumps(written, default=str)) | {"architectures": [architecture]})
        seen += 1
    assert seen > 100
