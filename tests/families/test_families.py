"""What is known of the families, against Hugging Face's own classes."""

import importlib
import inspect
import pickle
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_house
from checkpoints.hugging_face import saved, tiny
from facts import FACTS
from on_file import Sentence
from serving import ROOT
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from attnres_serve.errors import CheckpointError
from attnres_serve.families import BY_ARCHITECTURE, FAMILIES, expert_checks, layout_of
from attnres_serve.families.limits import Limit
from attnres_serve.formats.resolve import resolve
from attnres_serve.model import config as model_config
from attnres_serve.verify import oracle

STOCK = [name for name, family in FAMILIES.items() if family.is_stock]
CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"head_dim": 32},
    {"attention_bias": True},
    {"mlp_bias": True},
]


def test_those_that_vllm_has_come_first() -> None:
    """The order is that of error sentences, whatever the file system's."""
    assert [*FAMILIES] == [*sorted(STOCK), *sorted({*FAMILIES} - {*STOCK})]
    assert all(family.name == name for name, family in FAMILIES.items())
    assert len(BY_ARCHITECTURE) == len(FAMILIES)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        (name, one)
        for name in STOCK
        for one in VARIANTS
        if set(one) <= set(FAMILIES[name].keys()) and one not in FACTS[name].refused
    ],
    ids=str,
)
def test_tensors_are_those_of_hugging_face(name: str, variant: dict[str, Any]) -> None:
    """Every name and shape, with every key that the family reads."""
    family = FAMILIES[name]
    if FACTS[name].is_tiny:
        config = tiny(name, **variant)
        expected = {key: tuple(tensor.shape) for key, tensor in saved(config).items()}
        assert family.shapes(config) == expected
        return
    config = CONFIG | variant
    own = CONFIG_MAPPING[family.hf](**config)
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(own)](own)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if own.tie_word_embeddings:
        del expected["lm_head.weight"]
    # vLLM's has none on o; a checkpoint with one is refused.
    if name == "qwen3" and own.attention_bias:
        expected = {
            key: shape for key, shape in expected.items() if not key.endswith("o_proj.bias")
        }
    assert family.shapes(config) == expected


def translated(name: str, **changes: Any) -> Any:
    """A config.json of the house format, resolved."""
    family = FAMILIES[name]
    own = {"model_type": family.model_type, "architectures": [family.architecture]}
    config = tiny(name) if FACTS[name].is_tiny else CONFIG
    return resolve(config | own | {"attn_res": {"block_size": 2}} | changes)


@pytest.mark.parametrize("name", FAMILIES)
def test_variants_are_served_as_they_are(name: str) -> None:
    """Nothing that a variant states is left out on the way to vLLM."""
    for changes in FACTS[name].variants.values():
        result = translated(name, num_hidden_layers=4, **changes)
        assert result.config.items() >= changes.items()


@pytest.mark.parametrize(
    ("name", "changes"), [(name, one) for name in FAMILIES for one in FACTS[name].refused], ids=str
)
def test_what_would_be_another_model_is_refused(name: str, changes: dict[str, Any]) -> None:
    assert translated(name) is not None
    with pytest.raises(CheckpointError):
        translated(name, **changes)


DENSE = ["dense"] * 4


@pytest.mark.parametrize(
    ("name", "key", "changes"),
    [
        ("glm4_moe", "first_k_dense_replace", {}),
        ("glm4_moe_lite", "first_k_dense_replace", {"mlp_layer_types": DENSE}),
        ("lfm2_moe", "num_dense_layers", {}),
    ],
)
def test_a_mixture_without_any_expert_is_refused(
    name: str, key: str, changes: dict[str, Any], sentence: Sentence
) -> None:
    """vLLM's class of these looks for a layer with experts, and ends where there is none."""
    sentence.raises(CheckpointError, translated, name, **changes | {"num_hidden_layers": 4, key: 4})


@pytest.mark.parametrize("stated", [{"dense": 5}, {"dense": 3}, {}])
def test_layers_without_experts_are_counted_from_the_first(stated: dict[str, int]) -> None:
    """More than there are, as many, and as many as Hugging Face's class has by default."""
    check = expert_checks.some("dense", usual=2)
    check("any", stated | {"num_hidden_layers": 6})
    layers = stated.get("dense", 2)
    for fewer in (layers, layers - 1):
        with pytest.raises(CheckpointError, match=f"State a dense of {fewer - 1} at most"):
            check("any", stated | {"num_hidden_layers": fewer})


def test_those_that_show_their_layers_are_known() -> None:
    """By vLLM's classes: the decoder calls the hook, and the model says so."""
    interfaces = pytest.importorskip("vllm.model_executor.models.interfaces")
    result = set()
    for family in FAMILIES.values():
        model = getattr(importlib.import_module(family.module), family.cls)
        modules = {sys.modules[base.__module__] for base in model.__mro__}
        decoders = [
            decoder
            for module in modules
            for name, decoder in inspect.getmembers(module, inspect.isclass)
            if name.endswith("Model") and decoder.__module__ == module.__name__
        ]
        calls = any("._maybe_add_hidden_state(" in inspect.getsource(d.forward) for d in decoders)
        if calls and interfaces.SupportsEagle3 in model.__mro__:
            result.add(family.name)
    shown = {family.name for family in FAMILIES.values() if Limit.SHOWN_LAYERS not in family.limits}
    # Granite's decoder here is ours, without a call; the others were not tried.  Drafts of
    # Nemotron-H need a GPU.
    untried = {"granite", "nemotron_h", "gated_llama", "normed_llama", "gated_deltanet", "kda"}
    assert result - untried == shown


def test_the_page_lists_those_without_a_prefix_cache_on_a_cpu() -> None:
    page = (ROOT / "docs" / "use" / "families.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## Prefixes\n(.*?)\n## ", page, re.S)
    listed = " ".join(section.split())
    for name, facts in FACTS.items():
        assert (FAMILIES[name].title in listed) == (not facts.caches_prefixes), name


def test_the_page_lists_them() -> None:
    """Run `python docs/use/families.py` where it does not."""
    (script,) = ROOT.glob("docs/**/families.py")
    page = runpy.run_path(str(script))
    assert page["PAGE"].read_text(encoding="utf-8") == page["text"]()


@pytest.mark.parametrize("name", FAMILIES)
def test_configurations_reach_other_processes(name: str) -> None:
    """By the name of their class, which is called as Hugging Face's own, with its model type."""
    family = FAMILIES[name]
    result = pickle.loads(pickle.dumps(model_config.build(translated(name))))
    assert type(result) is model_config.class_of(family)
    if family.has_hf_class:
        assert type(result).__name__ == CONFIG_MAPPING_NAMES[family.hf]
    assert result.model_type == family.hf
    assert layout_of(result.attn_res_config).num_layers == result.num_hidden_layers
    model_config.register_model_types()
    read = AutoConfig.for_model(family.model_type)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModel.from_config(read)


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FACTS[name].is_tiny])
def test_verify_knows_it(name: str, tmp_path: Path) -> None:
    """Its model in float64 reads the checkpoint, and sees the window that is served."""
    family = FAMILIES[name]
    for variant, changes in FACTS[name].variants.items():
        place = tmp_path / (variant or "usual")
        folder = write_house(place, name, layers=4, block_size=2, changes=changes)
        config = translated(name, num_hidden_layers=4, **changes).config
        attention = oracle.load(folder).spec.sublayers["attention"]
        assert attention.window == family.window(config)


def test_the_window_of_mistral() -> None:
    """4096 where the key is missing, for vLLM too, and what it says where it is not."""
    for changes, window in (
        ({}, 4096),
        ({"sliding_window": 24}, 24),
        ({"sliding_window": None}, None),
    ):
        parsed = translated("mistral", **changes)
        assert FAMILIES["mistral"].window(parsed.config) == window
        assert model_config.build(parsed).sliding_window == window
