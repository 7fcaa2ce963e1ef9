"""FLA's classes with a recurrence: their keys, what is refused, and the names of their tensors."""

from pathlib import Path
from typing import Any

import fla_models
import pytest
from on_file import Sentence
from safetensors import safe_open

from attnres_serve.checkpoints.check import describe
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.command import convert
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.formats import fla
from attnres_serve.formats.resolve import resolve
from attnres_serve.model import config as model_config

pytestmark = pytest.mark.filterwarnings("ignore")  # FLA's and Transformers' own


def stated(model_type: str = "gated_deltanet", **options: Any) -> dict[str, Any]:
    """A config.json as FLA's class writes it."""
    config_class, cls = fla_models.classes(model_type)
    config = config_class(**fla_models.SIZES | {"attnres_block_size": 4} | options).to_dict()
    return config | {"architectures": [cls.__name__]}


SHARED = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 320,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
KDA_SIZES = {"linear_key_head_dim": 48, "linear_conv_kernel_dim": 3}
WANTED: dict[str, dict[str, Any]] = {
    "gated_deltanet": {
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 64,
        "output_gate_type": "silu",
    },
    "kda": {"gate_lower_bound": None},
}


@pytest.mark.parametrize("model_type", fla_models.DELTA)
def test_a_config_in_full(model_type: str) -> None:
    """Every field that decides the numbers arrives under the name that vLLM reads."""
    actual = resolve(stated(model_type, norm_eps=1e-3))
    assert actual is not None
    assert (actual.format, actual.family, actual.qk_norm_eps) == ("fla", model_type, None)
    assert actual.spec == AttnResSpec(Layout.of(4), (0, 4), 1e-3, final_mix=True)
    expected = SHARED | WANTED[model_type] | {"rms_norm_eps": 1e-3}
    assert actual.config.items() >= expected.items()
    assert model_config.build(actual).model_type == model_type


@pytest.mark.parametrize(
    ("model_type", "changes", "expected"),
    [
        ("gated_deltanet", {"num_v_heads": 6}, {"linear_num_value_heads": 6}),
        ("gated_deltanet", {"expand_v": 1.5}, {"linear_value_head_dim": 48}),
        ("gated_deltanet", {"expand_v": 0.25}, {"linear_value_head_dim": 8}),
        ("gated_deltanet", {"output_gate_activation": "silu"}, {"output_gate_type": "silu"}),
        ("gated_deltanet", {"output_gate_activation": "sigmoid"}, {"output_gate_type": "sigmoid"}),
        ("gated_deltanet", {"attn_mode": "fused_recurrent", "fuse_norm": False}, {}),
        ("gated_deltanet", {"conv_size": 3}, {"linear_conv_kernel_dim": 3}),
        ("gated_deltanet", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
        ("gated_deltanet", {"intermediate_size": None}, {"intermediate_size": 512}),
        (
            "gated_deltanet",
            {"intermediate_size": None, "hidden_ratio": 7},
            {"intermediate_size": 768},
        ),
        ("kda", {"num_v_heads": 2, "attn_mode": "fused_recurrent"}, {}),
        ("kda", {"lower_bound": -2.5}, {"gate_lower_bound": -2.5}),
        ("kda", {"safe_gate": True, "lower_bound": -5}, {"gate_lower_bound": -5}),
        ("kda", {"head_dim": 48, "conv_size": 3}, KDA_SIZES),
    ],
)
def test_what_a_key_means(
    model_type: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    actual = resolve(stated(model_type, **changes))
    assert actual is not None
    assert actual.config.items() >= (SHARED | WANTED[model_type] | expected).items()


REFUSED: dict[str, list[dict[str, Any]]] = {
    "both": [
        {"use_short_conv": False},
        {"allow_neg_eigval": True},
        {"allow_neg_eigval": 0},
        {"attn": {"layers": [1], "num_heads": 2}},
        {"attn_mode": "naive"},
        {"hidden_act": "powlu"},
        {"expand_v": 0.7},
        {"expand_v": "2"},
        {"expand_v": 1e308},
        {"num_v_heads": 3},
        {"num_v_heads": 0},
        {"head_dim": 0},
        {"conv_size": 1},
        {"conv_bias": True},
        {"attnres_block_size": 3},
        {"norm_eps": 0},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    "gated_deltanet": [
        {"use_gate": False},
        {"output_gate_activation": "tanh"},
        {"output_gate_activation": ["silu"]},
    ],
    "kda": [
        {"expand_v": 2},
        {"num_v_heads": 4},
        {"safe_gate": 1},
        {"safe_gate": True},
        {"lower_bound": 0},
        {"lower_bound": -5.5},
        {"lower_bound": "-5"},
        {"use_gate": True},
        {"output_gate_activation": "swish"},
    ],
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [(name, one) for name in fla_models.DELTA for one in (*REFUSED["both"], *REFUSED[name])],
    ids=str,
)
def test_what_is_refused(model_type: str, changes: dict[str, Any], sentence: Sentence) -> None:
    assert resolve(stated(model_type)) is not None
    sentence.raises(CheckpointError, resolve, stated(model_type) | changes)


@pytest.mark.parametrize("model_type", fla_models.DELTA)
def test_every_key_of_its_configuration_is_known(model_type: str) -> None:
    """Read, refused, or of training alone: a new version's keys are looked at before they are."""
    training = {"use_cache", "initializer_range", "fuse_norm", "fuse_swiglu", "attn_mode"}
    training |= {"fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp"}
    read = {"attnres_block_size", "hidden_size", "num_hidden_layers", "num_heads", "num_v_heads"}
    read |= {"head_dim", "conv_size", "expand_v", "norm_eps", "hidden_act", "hidden_ratio", "attn"}
    read |= {"intermediate_size", "max_position_embeddings", "vocab_size", "tie_word_embeddings"}
    read |= {"use_short_conv", "allow_neg_eigval", *OWN[model_type]}
    config_class, _ = fla_models.classes(model_type)
    common = {"pad_token_id", "bos_token_id", "eos_token_id"}
    names = set(
        config_class.__init__.__code__.co_varnames[1 : config_class.__init__.__code__.co_argcount]
    )
    assert names - training - common == read


OWN = {
    "gated_deltanet": {"use_gate", "output_gate_activation"},
    "kda": {"safe_gate", "lower_bound"},
}


@pytest.mark.parametrize("model_type", fla_models.DELTA)
def test_it_is_claimed_by_everything(model_type: str) -> None:
    config = stated(model_type)
    assert fla.matches(config)
    for changes in (
        {"architectures": ["TransformerForCausalLM"]},
        {"model_type": "transformer"},
        {"auto_map": {"AutoConfig": "configuration_x.X"}},
    ):
        assert not fla.matches(config | changes)
    for key in ("attnres_block_size", "conv_size", "num_heads"):
        assert not fla.matches({name: value for name, value in config.items() if name != key})


@pytest.mark.parametrize("model_type", fla_models.DELTA)
def test_tensors_are_those_that_it_saves(model_type: str, tmp_path: Path) -> None:
    """With and without AttnRes; the house format has the same, and says the same."""
    plain = fla_models.write(tmp_path / "plain", model_type, 1, attnres_block_size=None)
    own = fla_models.write(tmp_path / "own", model_type, 1, attnres_block_size=4)
    convert(str(own), str(tmp_path / "house"), to_house=True)
    facts = {path.name: describe(check_folder(path)) for path in (plain, own, tmp_path / "house")}
    assert facts["plain"]["attnres_parameters"] == 0
    changed = {"format": "house"}
    assert facts["house"] == facts["own"] | changed
    with safe_open(own / "model.safetensors", "pt") as file:
        count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    assert facts["own"]["parameters"] == count
    assert facts["own"]["kv_cache_bytes_per_token"] == 0
