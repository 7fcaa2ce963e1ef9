"""qwen3_ar, open-attnres, delta-attnres and torchtitan: recognised, told apart, refused by name."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from checkpoints import (
    GOLDENS,
    config_of,
    edit,
    write_house,
    write_kimi_names,
    write_mode,
    write_titan,
)
from hub import MODEL, server
from on_file import Sentence
from safetensors.torch import load_file

from attnres_serve import cli
from attnres_serve.checkpoints import checked
from attnres_serve.compat import openai_server
from attnres_serve.depth.layout import Layout
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.formats.resolve import resolve

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CUMULATIVE, DELTA = "qwen3_attnres_cumulative_block", "qwen3_attnres_block"


def golden(name: str, **changes: Any) -> dict[str, Any]:
    return config_of(GOLDENS / name, **changes)


# --- what is made of each


WRITERS = {
    "qwen3_ar": (lambda f, **o: write_kimi_names(f, block_layers=2, **o), "qwen3"),
    "open_attnres": (lambda f, **o: write_mode(f, cumulative=True, **o), "qwen3"),
    "delta_attnres": (lambda f, **o: write_mode(f, **o), "qwen3"),
    "delta_attnres llama": (lambda f, **o: write_mode(f, "llama", **o), "llama"),
    "torchtitan": (lambda f, **o: write_titan(f, **o), "qwen3"),
}
OWN_KEYS = ("attn_res", "attnres", "auto_map")


@pytest.mark.parametrize("name", WRITERS)
def test_the_base_familys_config_and_every_tensor(name: str, tmp_path: Path) -> None:
    """The base's keys arrive untouched, the format's own do not; every tensor has its place."""
    write, base = WRITERS[name]
    folder = write(tmp_path, layers=5)
    parsed = checked.check_folder(folder).parsed
    assert parsed is not None and parsed.format == name.split()[0]
    assert (parsed.family, parsed.qk_norm_eps) == (base, None)
    own = {key: value for key, value in config_of(folder).items() if not key.startswith(OWN_KEYS)}
    assert parsed.config == own


R1 = {"key_norm_eps": 1e-6}
SEVEN = {"num_hidden_layers": 7, "layer_types": None}
CUMULATIVE_SPEC = R1 | {"final_mix": False, "cumulative": True, "recency_bias": True}
AR = {"model_type": "qwen3_ar", "architectures": ["Qwen3ARForCausalLM"]}
SIZES = {"hidden_size": 64, "rms_norm_eps": 1e-6}
TITAN = {"model_type": "qwen3", "architectures": ["Qwen3BlockAttnResForCausalLM"]}


@pytest.mark.parametrize(
    ("config", "starts", "options"),
    [
        # Layers a block.
        (AR | {"num_hidden_layers": 5, "attn_res_block_size": 2}, (0, 4, 8), R1),
        (AR | {"num_hidden_layers": 4, "attn_res_block_size": 9}, (0,), R1),
        (
            AR | {"num_hidden_layers": 3, "attn_res_block_size": 1, "attn_res_output_route": False},
            (0, 2, 4),
            R1 | {"final_mix": False},
        ),
        # Blocks, by the ceiling of 6 / 4, 7 / 3, 6 / 9; and every sublayer.
        (golden(DELTA), (0, 4, 8), R1),
        (
            golden(DELTA, num_hidden_layers=7, layer_types=None, attnres_num_blocks=3),
            (0, 6, 12),
            R1,
        ),
        (golden(DELTA, attnres_num_blocks=9), (0, 2, 4, 6, 8, 10), R1),
        (golden("qwen3_attnres_full"), tuple(range(12)), R1),
        (golden(CUMULATIVE), (0, 4, 8), CUMULATIVE_SPEC),
        (golden(CUMULATIVE, **SEVEN), (0, 4, 8, 12), CUMULATIVE_SPEC),
        (golden("qwen3_attnres_cumulative_full"), tuple(range(12)), CUMULATIVE_SPEC),
        # Blocks, by the floor of 5 / 2, 7 / 4, 3 / 9.
        (TITAN | {"num_hidden_layers": 5, "attn_res_num_blocks": 2}, (0, 4, 8), R1),
        (TITAN | {"num_hidden_layers": 7, "attn_res_num_blocks": 4}, tuple(range(0, 14, 2)), R1),
        (TITAN | {"num_hidden_layers": 3, "attn_res_num_blocks": 9}, (0, 2, 4), R1),
    ],
)
def test_specifications_by_hand(config: dict, starts: tuple[int, ...], options: dict) -> None:
    """Each unit of the block size becomes the sublayers that it means."""
    config = SIZES | config
    parsed = resolve(config)
    assert parsed is not None
    layout = Layout.of(config["num_hidden_layers"])
    assert parsed.spec == AttnResSpec(layout, starts, **options)


def test_qwen3_ar_without_blocks_has_standard_residuals(tmp_path: Path) -> None:
    parsed = checked.check_folder(write_kimi_names(tmp_path, block_layers=None)).parsed
    assert parsed is not None and parsed.spec is None


def test_qwen3_ar_is_served_without_its_own_code() -> None:
    """It saves an `auto_map`; model type and architecture are its own, so it is claimed."""
    config = SIZES | AR | {"num_hidden_layers": 2, "attn_res_block_size": 1}
    config["auto_map"] = {"AutoConfig": "configuration_qwen3_ar.Qwen3ARConfig"}
    for own_code in (True, False):
        parsed = resolve(config, own_code)
        assert parsed is not None and "auto_map" not in parsed.config


# --- open-attnres or delta-attnres


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("qwen3_attnres_*")), ids=lambda p: p.name)
def test_goldens_are_told_apart_by_their_tensors(path: Path) -> None:
    """Also where both formats' keys, or none of them, are in config.json."""
    expected = "open_attnres" if "cumulative" in path.name else "delta_attnres"
    keys = ("attnres_recency_bias_init", "attnres_use_null_source")
    for changes in ({}, {keys[0]: 0.0, keys[1]: False}, dict.fromkeys(keys, ...)):
        parsed = checked.translate(golden(path.name, **changes), False, path)
        assert parsed is not None and parsed.format == expected


def test_an_index_tells_as_well(tmp_path: Path) -> None:
    """Names are all that is needed, wherever the files are."""
    shutil.copy(GOLDENS / DELTA / "config.json", tmp_path)  # its keys say delta-attnres
    names = load_file(GOLDENS / CUMULATIVE / WEIGHTS)
    table = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / INDEX).write_text(json.dumps(table))
    parsed = checked.translate(config_of(tmp_path), False, tmp_path)
    assert parsed is not None and parsed.format == "open_attnres"


def test_dummy_weights(tmp_path: Path) -> None:
    """Tensors decide where there are any, then a key that only one of the formats writes."""
    from in_process import vllm_config

    from attnres_serve import plugin

    plugin.register()
    folder = shutil.copytree(GOLDENS / CUMULATIVE, tmp_path / "checkpoint")
    edit(folder, attnres_use_null_source=False)  # both formats' keys now

    def dummy() -> str:
        return vllm_config(folder, load_format="dummy").model_config.hf_config.attn_res_format

    assert dummy() == "open_attnres"
    (folder / WEIGHTS).unlink()
    both = (
        r"null_source \(of delta_attnres only\) and attnres_recency_bias_init "
        r"\(of open_attnres only\): no"
    )
    with pytest.raises(ValueError, match=both):
        dummy()
    shutil.copy(GOLDENS / DELTA / "config.json", folder)
    assert dummy() == "delta_attnres"
    edit(folder, without=["attnres_use_null_source"])
    with pytest.raises(ValueError, match=r"nothing that only one of them has: .*not at hand"):
        dummy()


def test_the_launcher_with_dummy_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A config.json and a tokenizer can be served with them, and only with them."""
    served = []
    monkeypatch.setattr(openai_server, "run_server", lambda *arguments: served.append(arguments))
    monkeypatch.setenv("VLLM_PLUGINS", "")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(GOLDENS / DELTA / name, tmp_path)
    assert cli.main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "no *.safetensors file" in capsys.readouterr().err and not served
    assert cli.main(["serve", str(tmp_path), "--port", "0", "--load-format", "dummy"]) == 0
    assert len(served) == 1


# --- a hub


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A model with delta-attnres on its main branch and open-attnres at v2; the environment."""
    root = tmp_path / "hub"
    shutil.copytree(GOLDENS / DELTA, root / "main")
    shutil.copytree(GOLDENS / CUMULATIVE, root / "v2")
    edit(shutil.copytree(root / "v2", root / "broken"), lambda t: t.pop("model.norm.weight"))
    running = server(root)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield {
        "HF_ENDPOINT": f"http://127.0.0.1:{running.server_address[1]}",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "VLLM_PLUGINS": "",
    }
    running.shutdown()
    running.server_close()


ASK = """
from attnres_serve.checkpoints.checked import check_hub
from attnres_serve.errors import CheckpointError
from attnres_serve.plugin import register
from vllm.transformers_utils.config import get_config
register()
answers = []
for revision in (None, "main", "v2"):
    config = get_config(sys.argv[1], trust_remote_code=False, revision=revision)
    answers.append([config.attn_res_format, check_hub(sys.argv[1], revision).parsed.format])
try:
    answers.append(str(check_hub(sys.argv[1], "broken")))
except CheckpointError as error:
    answers.append(str(error))
answer = answers
"""
FETCHED = """
from pathlib import Path
from huggingface_hub import constants
answer = [path.suffix for path in Path(constants.HF_HOME).rglob("*.*")]
"""
DOWNLOAD = """
from huggingface_hub import snapshot_download
answer = [snapshot_download(sys.argv[1], revision=name) for name in ("main", "v2", "broken")]
"""
OFFLINE = f"""
from huggingface_hub import constants
constants.HF_HUB_OFFLINE, constants.ENDPOINT = True, "http://127.0.0.1:9"
{ASK}
"""


def test_a_model_id_is_judged_by_its_headers(hub: dict[str, str]) -> None:
    """At each revision its own format, with no weights fetched; then the same from the cache."""
    both = [["delta_attnres"] * 2, ["delta_attnres"] * 2, ["open_attnres"] * 2]
    online, fetched, _, offline = fresh.answers((ASK, FETCHED, DOWNLOAD, OFFLINE), MODEL, **hub)
    assert ".json" in fetched and ".safetensors" not in fetched
    for *result, broken in (online, offline):
        assert result == both and "lacks the tensor model.norm.weight" in broken


@pytest.mark.engine
@pytest.mark.exhaustive
def test_a_model_id_is_served_at_its_revision(hub: dict[str, str], tmp_path: Path) -> None:
    """API server and engine core are two processes; the answers are those of the golden."""
    from goldens import check_golden_over_http
    from serving import OURS, running

    flags = ("--revision", "v2", "--dtype", "float32", "--max-model-len", "256")
    flags += ("--enforce-eager", "--enable-prompt-tokens-details")
    with running(OURS, Path(MODEL), tmp_path / "log", *flags, **hub) as served:
        assert served.info["format"] == "open_attnres"
        check_golden_over_http(served, GOLDENS / CUMULATIVE)


# --- refused by name


MODES = ("delta", "delta_block", "full_mh", "block_mh", "full_hw", "block_v", "full_split")
GATES = ("sigmoid_scalar", "sigmoid_vector", "learnable_alpha", "new")
OF_AR = SIZES | AR | {"num_hidden_layers": 4, "attn_res_block_size": 1}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]}
REFUSED: dict[str, dict[str, Any]] = {
    **{
        f"mode {mode}": golden(DELTA, attnres_mode=mode)
        for mode in (*MODES, "pre_gated", "hyper_connection", None)
    },
    **{
        f"gate {gate} of {name}": golden(name, attnres_gate_type=gate)
        for name in (DELTA, CUMULATIVE)
        for gate in GATES
    },
    **{
        f"null source of {name}": golden(name, attnres_use_null_source=True)
        for name in (DELTA, CUMULATIVE)
    },
    "blocks of delta-attnres": golden(DELTA, attnres_num_blocks=0),
    "another key": golden(DELTA, attnres_window=4),
    "sigmoid": golden(DELTA, attn_res_activation="sigmoid"),
    "layers of qwen3_ar": OF_AR | {"attn_res_block_size": 1.5},
    "route of qwen3_ar": OF_AR | {"attn_res_output_route": 1},
    "null source of qwen3_ar": OF_AR | {"attn_res_use_null_source": True},
    "window of qwen3_ar": OF_AR | {"num_hidden_layers": 1} | WINDOW,
    "blocks of torchtitan": SIZES | TITAN | {"num_hidden_layers": 4, "attn_res_num_blocks": None},
    "layers": golden(DELTA, num_hidden_layers=None),
    "layer types": golden(DELTA, layer_types=7),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_are_refused(name: str, sentence: Sentence) -> None:
    """By what was found in them."""
    sentence.raises(CheckpointError, resolve, REFUSED[name])


def put(name: str, *shape: int) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


LAYER = "model.layers.1."


@pytest.mark.parametrize(
    ("source", "tensors"),
    [
        # 3b, which has both; and a half of each format.
        (DELTA, put(LAYER + "attn_res_bias")),
        (CUMULATIVE, put("model.final_res_proj.weight", 1, 64)),
        (DELTA, lambda t: [t.pop(f"model.final_res_{part}.weight") for part in ("proj", "norm")]),
        (CUMULATIVE, lambda t: t.pop(LAYER + "mlp_res_bias")),
        (CUMULATIVE, put(LAYER + "mlp_res_bias", 64)),
        (DELTA, put(LAYER + "attn_null_source", 64)),
        (DELTA, put(LAYER + "attn_res_gate_logit")),
        (DELTA, put(LAYER + "v_res_proj.weight", 1, 64)),
        (DELTA, put(LAYER + "attn_res_proj.weight", 4, 64)),
        (DELTA, put(LAYER + "self_attention_res_proj.weight", 1, 64)),
        (DELTA, put("model.layers.6.mlp_res_proj.weight", 1, 64)),
        ("llama", put(LAYER + "attn_res_bias")),  # no published code has one
    ],
)
def test_tensors_that_are_refused(
    source: str, tensors: Callable[[dict], Any], tmp_path: Path, sentence: Sentence
) -> None:
    """Missing, left over, of both formats, or of a function that is not served."""
    folder = tmp_path / "checkpoint"
    if source == "llama":
        write_mode(folder, source)
    else:
        shutil.copytree(GOLDENS / source, folder)
    sentence.raises(CheckpointError, checked.check_folder, edit(folder, tensors))


def test_house_tensors_of_shared_queries(tmp_path: Path, sentence: Sentence) -> None:
    """The sites that share have no tensors of their own, and the ones that are shared must be."""
    shared = {"shared_queries": "layer", "recency_bias": True}
    checked.check_folder(write_house(tmp_path, block_size=2, attn_res=shared))
    edit(tmp_path, put(LAYER + "mlp_res_norm.weight", 64))
    sentence.raises(CheckpointError, checked.check_folder, tmp_path)
    write_house(tmp_path, block_size=2, attn_res=shared)
    edit(tmp_path, attn_res={"block_size": 2, "recency_bias": True})
    sentence.raises(CheckpointError, checked.check_folder, tmp_path)


# --- a tied head


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_is_stored(same: bool, tmp_path: Path, sentence: Sentence) -> None:
    """A copy of the embedding is harmless; another head was perhaps trained, and is refused."""
    folder = write_mode(tmp_path, tie=True)

    def add(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][7, 7] += 0 if same else 1

    edit(folder, add)
    if same:
        assert checked.check_folder(folder).parsed is not None
        return
    sentence.raises(CheckpointError, checked.check_folder, folder)
