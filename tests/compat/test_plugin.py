"""The entry point: it registers what it must, touches nothing else, and never stops vLLM."""

import argparse
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import GOLDENS, write_fla
from checkpoints.tiktoken_files import write_kimi
from commands import python
from facts import TINY
from vllm_configs import vllm_config

from attnres_serve import plugin, settings
from attnres_serve.checkpoints import checked, draft, hub
from attnres_serve.compat import (
    decoder,
    device,
    drafts,
    host,
    openai_server,
    registry,
    rules,
    versions,
)
from attnres_serve.compat.device import Kind
from attnres_serve.compat.engine_facts import EngineFacts
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.kernels import backends, comparison
from attnres_serve.kernels.cpp import backend as cpp_backend
from attnres_serve.kernels.cpp import direct
from attnres_serve.kernels.torch import backend as torch_backend
from attnres_serve.model import backend as backend_choice
from attnres_serve.model import config as model_config
from attnres_serve.server import launcher

GOLDEN = GOLDENS / "fla_transformer_block"


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What we log by ``vllm``'s own logger, which does not propagate; its children are vLLM's."""
    import vllm  # noqa: F401  its first import may set up the logger anew, without our handler

    result: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.addFilter(lambda record: record.name == "vllm")
    handler.emit = lambda record: result.append(record.getMessage())
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.WARNING)  # its first import may have been told to log errors only
    logger.addHandler(handler)
    yield result
    logger.removeHandler(handler)
    logger.setLevel(level)


# --- register


def test_registering_twice_changes_nothing_more(warnings: list[str]) -> None:
    """vLLM may load a plugin more than once in a process; the parser is wrapped only once."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.config import _CONFIG_FORMAT_TO_CONFIG_PARSER as PARSERS

    plugin.register()
    once = PARSERS["hf"]
    plugin.register()
    assert PARSERS["hf"] is once and once.understands_attnres
    assert not getattr(once.__base__, "understands_attnres", False)
    for family in FAMILIES.values():
        assert family.architecture in ModelRegistry.get_supported_archs()
        hook = MODELS_CONFIG_MAP[family.architecture]
        treated_as = family.treated_as or family.stock_architecture
        if treated_as not in MODELS_CONFIG_MAP:  # others run vLLM's hook first
            assert hook.verify_and_update_config is plugin.on_config
    assert warnings == []


@pytest.mark.parametrize(
    ("family", "is_hybrid"), [("Llama", False), ("KimiLinear", True)], ids=lambda given: str(given)
)
@pytest.mark.parametrize("on_cpu", [True, False], ids=["CPU", "GPU"])
def test_a_class_is_inspected_here_where_that_cannot_initialise_cuda(
    on_cpu: bool, family: str, is_hybrid: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm import ModelRegistry
    from vllm.model_executor.models import registry as vllms

    elsewhere = []
    monkeypatch.setitem(ModelRegistry.models, "MadeUp", None)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU if on_cpu else Kind.CUDA)
    monkeypatch.setattr(
        vllms, "_run_in_subprocess", lambda inspect: elsewhere.append(inspect) or inspect()
    )
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    target = f"attnres_serve.model.causal_lm:AttnRes{family}ForCausalLM"
    registry.register_class("MadeUp", target)
    info = ModelRegistry.models["MadeUp"].inspect_model_cls()
    assert (info.supports_pp, info.is_hybrid) == (True, is_hybrid)
    assert len(elsewhere) == (0 if on_cpu else 1)
    assert any(tmp_path.iterdir()) is not on_cpu


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (versions, "unsupported"),
        (registry, "install_config_parser"),
        (registry, "register_architecture"),
        (model_config, "register_model_types"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyError("hf"), ImportError("gone")])
def test_register_never_raises(
    module: Any, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Whatever breaks inside, vLLM starts for all other models, and one warning says why."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(module, name, fail)
    plugin.register()
    (warning,) = warnings
    assert type(error).__name__ in warning and str(error) in warning
    assert "all other models are" in warning


@pytest.mark.parametrize(
    "version", ["0.26.1", "0.27.9", "0.34.0rc1", "0.40.0", "1.0", "1.28.0", "dev", ""]
)
def test_unsupported_versions(
    version: str, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """One sentence with what was found and what is supported, and nothing is registered."""
    import vllm

    def fail(*arguments: object) -> None:
        pytest.fail("something was registered")

    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(model_config, "register_model_types", fail)
    monkeypatch.setattr(registry, "install_config_parser", fail)
    monkeypatch.setattr(registry, "register_architecture", fail)
    plugin.register()
    (warning,) = warnings
    assert f"supports vLLM 0.28 to 0.32, found {version}: " in warning


@pytest.mark.parametrize(
    "version",
    ["0.28.0", "0.29.1", "0.31.0", "0.32.7", "0.32rc1", "0.32.1.dev3+g123", "0.32.0+cpu"],
)
def test_supported_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch releases, candidates, development and local builds of the minor versions."""
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    assert versions.unsupported() is None
    assert versions.untested() is None


@pytest.mark.parametrize("version", ["0.33.0", "0.33.2", "0.33.0rc1", "0.33.0.dev12+gabc1234"])
def test_an_untested_version_is_allowed_with_a_warning(
    version: str, monkeypatch: pytest.MonkeyPatch, warnings: list[str], warned: list[str]
) -> None:
    """One line, when an AttnRes checkpoint is configured; other models are not bothered."""
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    plugin.register()
    assert warned == warnings == []
    plugin.on_config(vllm_config(GOLDEN))
    (warning,) = warned
    assert f"tested with vLLM 0.28 to 0.32 and not with {version}: " in warning
    assert "\n" not in warning


def test_importing_the_plugin_is_cheap() -> None:
    """vLLM imports it in every process; the heavy modules come only when it registers."""
    script = "import sys, attnres_serve.plugin; print({*sys.modules} & {%r, %r, %r})"
    assert python(script % ("torch", "vllm", "transformers")) == "set()\n"


# --- on_config


@pytest.fixture(autouse=True)
def asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Model ids, with their revisions, whose headers would have been fetched."""
    calls: list[tuple] = []
    usual = hub.tokenizer_folder
    monkeypatch.setattr(
        hub, "tokenizer_folder", lambda *of: usual(*of) if Path(of[0]).is_dir() else None
    )

    def check_hub(*arguments: Any) -> SimpleNamespace:
        calls.append(arguments)
        return SimpleNamespace(index=None)

    monkeypatch.setattr(checked, "check_hub", check_hub)
    return calls


def speculative(method: str | None, model: object = "some/model") -> SimpleNamespace:
    """A configuration with drafts by a method, or with none that are made."""
    drafts = SimpleNamespace(method=method, draft_model_config=None)
    return vllm_config(model, speculative_config=drafts)


@pytest.mark.parametrize("method", ["dflash", "extract_hidden_states", "medusa", "suffix"])
def test_speculation_that_is_refused(method: str) -> None:
    """Whatever looks inside the target model, or was never tried, is refused by its name."""
    config = speculative(method)
    reason = "CUDA streams" if method == "extract_hidden_states" else "with AttnRes"
    with pytest.raises(
        SettingError, match=f"by '{method}' is not .*{reason}.*: ngram, draft_model"
    ):
        plugin.on_config(config)
    assert config.load_config.load_format == "auto"


@pytest.mark.parametrize("method", draft.SPECULATION)
def test_drafts_of_pipelines_are_refused(method: str) -> None:
    """In vLLM 0.32 a stage without a drafter ends by an exception."""
    config = speculative(method)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(SettingError, match="with pipeline parallelism, of which only the last"):
        plugin.on_config(config)


def head_config(method: str, asked: str | None, **own: Any) -> Any:
    drafts = SimpleNamespace(hf_config=SimpleNamespace(**own), use_mla=False)
    config = vllm_config(
        additional_config={} if asked is None else {settings.STREAM_KEY: asked},
        speculative_config=SimpleNamespace(method=method, draft_model_config=drafts),
    )
    config.model_config.hf_config.attn_res = {"block_size": 2, "key_norm_eps": 1e-6}
    return config


@pytest.mark.parametrize(
    ("asked", "own", "sentence"),
    [
        (
            None,
            {},
            r"needs to know .*: give --attnres-aux-stream partial .*, or attnres_aux_stream",
        ),
        ("auto", {"eagle_config": {"use_aux_hidden_state": True}}, "needs to know"),
        ("mixed", {"attnres_aux_stream": "partial"}, "stream is mixed, and .* config.json is part"),
        (None, {"attnres_aux_stream": "sum"}, "is 'sum'; expected one of partial, mixed"),
        ("mixed", {"attnres_aux_stream": ["mixed"]}, r"is \['mixed'\]; expected one of"),
        ("prefix", {}, "is 'prefix'; expected one of partial, mixed"),
    ],
)
def test_the_stream_of_a_head_is_not_guessed(asked, own, sentence) -> None:
    with pytest.raises(SettingError, match=sentence):
        plugin.on_config(head_config("eagle3", asked, **own))


@pytest.mark.parametrize(
    ("method", "asked", "own", "settled"),
    [
        ("eagle3", "partial", {}, "partial"),
        ("eagle3", None, {"attnres_aux_stream": "mixed"}, "mixed"),
        ("eagle3", "mixed", {"attnres_aux_stream": "mixed"}, "mixed"),
        ("eagle", None, {}, None),
        ("eagle3", None, {"eagle_config": {"use_aux_hidden_state": False}}, None),
    ],
)
def test_the_stream_of_a_head_is_what_is_stated(method, asked, own, settled) -> None:
    """In the settings, of which vLLM's compiled code is."""
    config = head_config(method, asked, **own)
    plugin.on_config(config)
    assert config.additional_config.get(settings.STREAM_KEY) == settled


@pytest.mark.parametrize(
    ("model", "revision", "said"),
    [
        ("elsewhere", "v2", "from the head of elsewhere, which is not the served checkpoint"),
        (GOLDEN, None, "needs a draft head, and none of Llama is supported"),  # folders have none
        (f"{GOLDEN}/", "v2", "needs a draft head, and none of Llama is supported"),
    ],
)
def test_heads_that_are_refused(model: Any, revision: str | None, said: str) -> None:
    """Of another checkpoint, which vLLM takes some draft models for; and where there is none."""
    drafts = SimpleNamespace(
        method="mtp", model=str(model), revision=revision, draft_model_config=None
    )
    with pytest.raises(CheckpointError, match=said):
        plugin.on_config(vllm_config(GOLDEN, speculative_config=drafts))


def test_a_model_id_at_another_revision_is_another_checkpoint() -> None:
    served = ["org/model"]
    assert drafts.another(served, "v2", "org/model", "v2") is None
    assert drafts.another(served, "v2", "org/model", None) == "org/model at revision None"
    assert drafts.another(served, "v2", "org/other", "v2") == "org/other"


@pytest.mark.parametrize("flag", [{"runner": "pooling"}, {"convert": "classify"}], ids=str)
def test_other_tasks_are_refused(flag: dict[str, str]) -> None:
    """vLLM would derive another class from ours, under a name that is none of a backbone."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    with pytest.raises(ValueError, match="classification and scoring are not supported with Attn"):
        EngineArgs(model=str(GOLDEN), max_model_len=64, **flag).create_engine_config()


@pytest.mark.parametrize("method", ["ngram", "draft_model", None])
def test_speculation_that_is_accepted_completes_the_configuration(method: str | None) -> None:
    """The weights are pinned to safetensors, and the workers get our extension."""
    config = speculative(method, GOLDEN)
    plugin.on_config(config)
    assert config.load_config.load_format == "safetensors"
    assert config.parallel_config.worker_extension_cls == "attnres_serve.worker.WorkerExtension"


@pytest.mark.parametrize(("name", "whose"), [("fla", "FLA"), ("nanogpt", "nanoGPT")])
def test_lora_with_other_names_is_refused(name: str, whose: str) -> None:
    """vLLM would apply the part of an adapter whose names it knows and drop the rest."""
    config = vllm_config(lora_config=SimpleNamespace())
    config.model_config.hf_config.attn_res_format = name
    with pytest.raises(SettingError, match=f"LoRA .* {whose}'s"):
        plugin.on_config(config)


def test_ray_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config()
    config.parallel_config.distributed_executor_backend = "ray"
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    plugin.on_config(config)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    with pytest.raises(SettingError, match=r"backend is ray, which vLLM has on GPUs alone"):
        plugin.on_config(config)


def test_vllm_has_no_ray_on_a_cpu() -> None:
    """Or it would be served by it too."""
    from vllm.platforms import current_platform

    assert current_platform.is_cpu() and current_platform.ray_device_key == ""


def test_overrides_in_the_checkpoints_own_keys_take_effect() -> None:
    """`--hf-overrides` is applied before the parsed, or it would be ignored silently."""
    from vllm.transformers_utils.config import get_config

    plugin.register()
    overrides = {"attnres_block_size": 2, "norm_eps": 1e-3}
    config = get_config(str(GOLDEN), trust_remote_code=False, hf_overrides_kw=overrides)
    assert config.attn_res["block_starts"] == [0, 2, 4, 6, 8]
    assert config.rms_norm_eps == config.attn_res["key_norm_eps"] == 1e-3


def test_what_the_user_chose_is_kept() -> None:
    """A load format and a worker extension of the user's own have precedence."""
    config = vllm_config(GOLDEN)
    config.load_config.load_format = "dummy"
    config.parallel_config.worker_extension_cls = "my.Extension"
    plugin.on_config(config)
    assert config.load_config.load_format == "dummy"
    assert config.parallel_config.worker_extension_cls == "my.Extension"


def test_weights_are_judged_before_a_worker_starts(tmp_path: Path) -> None:
    """A local folder is inspected, unless its weights will not be read."""
    folder = write_fla(tmp_path)
    plugin.on_config(vllm_config(folder))
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        plugin.on_config(vllm_config(folder))
    plugin.on_config(vllm_config(folder, load_config=SimpleNamespace(load_format="dummy")))


@pytest.mark.parametrize("key", ["intermediate_size", "num_attention_heads", "vocab_size"])
def test_a_size_that_is_open_is_refused_before_a_worker_starts(key: str) -> None:
    """Also where no weights are read."""
    config = vllm_config(load_config=SimpleNamespace(load_format="dummy"))
    del config.model_config.hf_config.attn_res_config[key]
    with pytest.raises(CheckpointError, match=key):
        plugin.on_config(config)


def test_ids_are_judged_before_a_worker_starts(tmp_path: Path) -> None:
    """Where vLLM's own command starts the engine."""
    folder = write_fla(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"pad_token": "[PAD]"}')
    with pytest.raises(CheckpointError, match=r"\[PAD\]' with the id 320"):
        plugin.on_config(vllm_config(folder))
    config = vllm_config(folder)
    config.model_config.skip_tokenizer_init = True
    plugin.on_config(config)
    (folder / "generation_config.json").write_text('{"eos_token_id": 320}')
    with pytest.raises(CheckpointError, match=r"eos_token_id of generation_config.json is 320"):
        plugin.on_config(config)


def test_a_tokenizer_is_read_rightly_by_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what vLLM's own functions make of the configuration, whatever the mode."""
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_kimi(write_fla(tmp_path / "m"))
    for mode in ("auto", "hf", "kimi_k3"):
        config = vllm_config(folder)
        model = config.model_config
        model.tokenizer_mode, model.tokenizer_revision = mode, "v2"
        plugin.on_config(config)
        assert model.tokenizer != str(folder) == model.model
        assert cached_tokenizer_from_config(model)("中a").input_ids == [257, 97]
        settled = model.tokenizer
        plugin.on_config(config)  # as vLLM does where it copies a configuration
        assert model.tokenizer == settled
    config = vllm_config(tmp_path / "m")
    config.model_config.trust_remote_code = True
    plugin.on_config(config)
    assert config.model_config.tokenizer == str(folder)


def test_a_tokenizer_of_another_class_is_refused(tmp_path: Path) -> None:
    """Unless it is not read, or another one is."""
    folder = write_kimi(write_fla(tmp_path / "m"), module="tokenization_x")
    config = vllm_config(folder)
    with pytest.raises(CheckpointError, match=r"is tokenization_x\.TikTokenTokenizer by auto_map"):
        plugin.on_config(config)
    config.model_config.tokenizer = str(GOLDEN)
    plugin.on_config(config)
    assert config.model_config.tokenizer == str(GOLDEN)
    config = vllm_config(GOLDEN)
    config.model_config.tokenizer = str(folder)
    with pytest.raises(CheckpointError, match="whose code is not run"):
        plugin.on_config(config)
    config.model_config.skip_tokenizer_init = True
    plugin.on_config(config)


def test_the_tokenizer_of_a_model_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_of_the_hub: list[tuple]
) -> None:
    """It is fetched to be looked at; one that cannot be had is left to vLLM."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    snapshot = write_kimi(tmp_path / "snapshot")
    monkeypatch.setattr(hub, "tokenizer_folder", lambda name, revision: snapshot)
    config = vllm_config()
    plugin.on_config(config)
    copy = Path(config.model_config.tokenizer)
    assert (copy / "tokenizer.json").is_file() and copy.parents[2] == tmp_path / "cache"
    monkeypatch.setattr(hub, "tokenizer_folder", lambda name, revision: None)
    config = vllm_config()
    plugin.on_config(config)
    assert config.model_config.tokenizer == "some/model"


def test_a_model_id_is_judged_at_its_revision(asked_of_the_hub: list[tuple]) -> None:
    """By its headers, which are not needed where the weights are not read."""
    plugin.on_config(vllm_config(load_config=SimpleNamespace(load_format="dummy")))
    assert asked_of_the_hub == []
    plugin.on_config(vllm_config())
    assert asked_of_the_hub == [("some/model", "v2")]


@pytest.mark.parametrize(
    ("additional_config", "sentence"),
    [
        ({"attnres_algorithm": "fast"}, "attnres_algorithm is 'fast'; expected one of single_pass"),
        ({"attnres_algorithm": None}, "attnres_algorithm is None"),
        ({"attnres_algorithm": ["auto"]}, r"attnres_algorithm is \['auto'\]"),
        ({"attnres_algoritm": "auto"}, "the unknown key 'attnres_algoritm'"),
        ({"attnres_block_size": 4}, "the unknown key 'attnres_block_size'"),
        (
            {"attnres_backend": "cuda"},
            "attnres_backend is 'cuda'; expected one of cpp, torch, triton, auto",
        ),
        ({"attnres_trace": False}, "attnres_trace is False; expected one of on, off, auto"),
        ({"attnres_shard_sites": True}, "attnres_shard_sites is True; expected one of on, off"),
        ({"attnres_shard_tokens": 1}, "attnres_shard_tokens is 1; expected a whole number of at"),
        ({"attnres_shard_tokens": "64"}, "attnres_shard_tokens is '64'"),
        ({"attnres_shard_tokens": True}, "attnres_shard_tokens is True"),
        (SimpleNamespace(), "expected a JSON object"),  # could not be given the backend
    ],
)
def test_settings_that_are_refused(additional_config: dict[str, Any], sentence: str) -> None:
    """A misspelt setting of ours is never ignored."""
    with pytest.raises(SettingError, match=sentence):
        plugin.on_config(vllm_config(additional_config=additional_config))


@pytest.mark.parametrize(
    ("changes", "parallel", "said"),
    [
        ({}, {"tensor_parallel_size": 1}, "and there is one worker; leave it out, or add --tensor"),
        ({}, {"pipeline_parallel_size": 2}, "with --pipeline-parallel-size; leave one out."),
        ({}, {"data_parallel_size": 2}, "with --data-parallel-size; leave"),
        ({}, {"decode_context_parallel_size": 2}, "with --decode-context-parallel-size; leave"),
        ({}, {"use_ubatching": True}, "with --enable-dbo; leave"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, {}, "with --speculative-config"),
        ({"invariant": True}, {}, "with VLLM_BATCH_INVARIANT; leave"),
    ],
)
def test_what_sites_are_not_sharded_with(
    changes: dict[str, Any], parallel: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each alone is refused with sites sharded, and with nothing else they are not."""
    monkeypatch.setattr(host, "batch_invariant", lambda: "invariant" in changes)
    sizes = ("tensor", "pipeline", "data", "decode_context")
    config = vllm_config(**changes)
    config.model_config.hf_config.attn_res_format = "house"
    values = {f"{size}_parallel_size": 2 if size == "tensor" else 1 for size in sizes}
    for name, value in (values | {"use_ubatching": False} | parallel).items():
        setattr(config.parallel_config, name, value)
    for asked in ({}, {"attnres_shard_sites": "auto"}, {"attnres_shard_sites": "off"}):
        assert settings.shard_tokens(asked) is None  # no gain was measured yet
    config.additional_config = {"attnres_shard_sites": "on"}
    with pytest.raises(SettingError, match=said):
        plugin.on_config(config)
    plain = vllm_config(GOLDEN, additional_config=config.additional_config)
    for name, value in (values | {"use_ubatching": False}).items():
        setattr(plain.parallel_config, name, value)
    monkeypatch.setattr(host, "batch_invariant", lambda: False)
    plugin.on_config(plain)
    assert settings.shard_tokens(config.additional_config) == settings.SHARD_TOKENS


def connector(name: str, **extra: Any) -> SimpleNamespace:
    """As much of a KVTransferConfig as is read."""
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)


CACHING = SimpleNamespace(enable_prefix_caching=True, kv_offloading_size=None)
CHUNKS = SimpleNamespace(enable_chunked_prefill=True)


@pytest.mark.parametrize(
    ("changes", "workers", "said"),
    [
        ({}, 2, "with --tensor-parallel-size"),
        ({"lora_config": SimpleNamespace()}, 1, "with --enable-lora"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, 1, "with --speculative-config"),
        ({"cache_config": CACHING}, 1, "add --no-enable-prefix-caching"),
        ({"scheduler_config": CHUNKS}, 1, "add --no-enable-chunked-prefill"),
        ({}, 1, None),
    ],
)
@pytest.mark.parametrize(
    ("connector", "is_example"),
    [
        (connector("ExampleConnector"), True),
        (connector("MultiConnector", connectors=[{"kv_connector": "ExampleConnector"}]), True),
        (connector("MultiConnector", connectors=[{"kv_connector": "NixlConnector"}]), False),
        (connector("NixlConnector"), False),
        (None, False),
    ],
    ids=("example", "among several", "others", "another", "none"),
)
def test_what_the_example_of_a_kv_connector_is_refused_with(
    connector: Any, is_example: bool, changes: dict[str, Any], workers: int, said: str | None
) -> None:
    """What it lacks another connector may have."""
    config = vllm_config(kv_transfer_config=connector, **changes)
    config.parallel_config.tensor_parallel_size = workers
    config.model_config.hf_config.attn_res_format = "house"
    if said is None or not is_example:
        rules.require(EngineFacts(config))
    else:
        with pytest.raises(SettingError, match=said):
            plugin.on_config(config)


def test_edits_and_a_store_of_what_others_computed() -> None:
    config = vllm_config(kv_transfer_config=connector("NixlConnector"))
    config.additional_config = {"attnres_edits": [{"mean": True}]}
    with pytest.raises(SettingError, match=r"^--attnres-edit .* by `attnres-serve convert --edit`"):
        rules.require(EngineFacts(config))
    config.additional_config = {}
    rules.require(EngineFacts(config))


@pytest.mark.parametrize("name", ["dummy", "sharded_state", "tensorizer", "of a plugin"])
@pytest.mark.parametrize(
    "asked", [{"attnres_edits": [{"mean": True}]}, {"attnres_edits_change": "on"}], ids=str
)
def test_edits_and_a_loader_that_passes_the_model_by(asked: dict[str, Any], name: str) -> None:
    """Nothing would write them, and answers would be those of the model without them."""
    config = vllm_config(load_config=SimpleNamespace(load_format=name))
    rules.require(EngineFacts(config))
    config.additional_config = asked
    with pytest.raises(SettingError, match=f"--load-format {name} passes by"):
        rules.require(EngineFacts(config))
    config.load_config.load_format = "safetensors"
    rules.require(EngineFacts(config))


@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("flag", ["--kv-transfer-config", "--kv-offloading-size"])
def test_recurrent_states_go_through_no_kv_connector(flag: str, family: str) -> None:
    """Nor through the one that vLLM makes of a size after it has called the plugin."""
    config = vllm_config()
    if flag == "--kv-transfer-config":
        config.kv_transfer_config = connector("NixlConnector")
    else:
        config.cache_config.kv_offloading_size = 1.0
    rules.require(EngineFacts(config))
    config.model_config.hf_config.attn_res_config = TINY[family]
    config.model_config.hf_config.architectures = [FAMILIES[family].architecture]
    said = rf"\({flag}\), .* the recurrent states of {FAMILIES[family].title}; start the server"
    with pytest.raises(SettingError, match=said):
        rules.require(EngineFacts(config))


def from_flags(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.from_flags(vars(parser.parse_args(words)))


def test_sharded_sites_are_asked_for_by_flags() -> None:
    tokens = ("--attnres-shard-tokens", "64")
    assert settings.shard_tokens(from_flags("--attnres-shard-sites", "on", *tokens)) == 64
    assert settings.shard_tokens(from_flags(*tokens)) is None


def test_traces_are_turned_off_by_a_flag() -> None:
    """And by the key that it becomes; without it they are on."""
    assert from_flags("--disable-trace") == {"attnres_trace": "off"} and from_flags() == {}
    assert not settings.traces({"attnres_trace": "off"})
    assert settings.traces({"attnres_trace": "on"}) and settings.traces(None)


MEASURED = {"dtype": torch.bfloat16, "hidden": 7168, "invariant": False}  # on a GPU, at most


@pytest.mark.parametrize(
    ("asked", "blocks", "sublayers", "backend", "other", "expected"),
    [
        ("auto", 23, 96, "cpp", {}, "single_pass"),
        ("auto", 24, 96, "cpp", {}, "two_phase"),
        (None, 24, 96, "cpp", {}, "two_phase"),
        ("auto", 96, 96, "torch", {}, "single_pass"),
        ("auto", 6, 36, "triton", {}, "two_phase"),
        ("auto", 6, 35, "triton", {}, "single_pass"),
        ("auto", 5, 72, "triton", {}, "single_pass"),
        ("auto", 96, 96, "triton", {}, "single_pass"),
        ("auto", 8, 72, "triton", {"dtype": torch.float16}, "single_pass"),
        ("auto", 8, 72, "triton", {"hidden": 7169}, "single_pass"),
        ("auto", 8, 72, "triton", {"invariant": True}, "single_pass"),
        ("single_pass", 96, 96, "cpp", {}, "single_pass"),
        ("two_phase", 8, 72, "cpp", {}, "two_phase"),
    ],
)
def test_auto_chooses_by_blocks(
    asked, blocks, sublayers, backend, other, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it was measured, and never against what was asked for."""
    given = MEASURED | other
    model = SimpleNamespace(dtype=given["dtype"], get_hidden_size=lambda: given["hidden"])
    monkeypatch.setattr(host, "batch_invariant", lambda: given["invariant"])
    chosen = {"attnres_algorithm": asked} if asked else {}
    config = vllm_config(additional_config=chosen, model_config=model)
    assert backend_choice.choose_algorithm(config, blocks, sublayers, backend) == expected


# --- VLLM_PLUGINS


INSTALLED = {
    "general_plugins": ["attnres", "lora"],
    "platform_plugins": ["npu"],
    "io_processor_plugins": ["lora"],
    "stat_logger_plugins": ["stats"],
    "endpoint_plugins": ["others_routes"],
}


@pytest.mark.parametrize(
    ("current", "installed", "expected"),
    [
        ("", INSTALLED, "attnres"),
        ("attnres", INSTALLED, "attnres"),
        ("mine", INSTALLED, "mine,attnres"),
        ("mine,,yours,mine", INSTALLED, "mine,yours,attnres"),
        ("attnres,mine", INSTALLED, "attnres,mine"),
        # Without the variable vLLM loads all but endpoint plugins.
        (None, INSTALLED, "attnres,lora,npu,stats"),
        (None, {}, "attnres"),
    ],
)
def test_plugins_that_are_loaded(current, installed, expected, monkeypatch) -> None:
    """The user's choice is kept and ours is added; what else is installed stays off."""

    def entry_points(group: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in installed.get(group.split(".")[1], [])]

    monkeypatch.setattr(launcher, "entry_points", entry_points)
    assert launcher.allowed_plugins(current) == expected


def test_flags_that_the_server_is_not_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second model, a value that vLLM refuses, and a version of vLLM that is not supported."""
    name = str(GOLDENS / "fla_transformer_block")
    with pytest.raises(SettingError, match="found the model 'other' among the flags"):
        openai_server.run_server(name, {}, ["other"], {})
    monkeypatch.setattr(versions, "unsupported", lambda: "too old.")
    with pytest.raises(SettingError, match="too old"):
        openai_server.run_server(name, {}, [], {})


MODEL = SimpleNamespace(dtype=torch.bfloat16)


def test_the_cpp_backend_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, not replaced, where it was asked for."""
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    config = SimpleNamespace(additional_config={"attnres_backend": "cpp"})
    with pytest.raises(SettingError, match="the cpp backend runs on CPU only"):
        backend_choice.choose(config)


@pytest.mark.parametrize(
    ("kind", "asked", "expected"),
    [
        (Kind.CUDA, "auto", "triton"),
        (Kind.CUDA, "triton", "triton"),
        (Kind.CUDA, "torch", "which the torch backend does not heed; choose the triton backend."),
        (Kind.CPU, "auto", "vLLM runs on CPU here, where that was not shown; unset it."),
        (Kind.CPU, "triton", "vLLM runs on CPU here, where that was not shown; unset it."),
        (Kind.ROCM, "auto", "vLLM runs on ROCm here, where that was not shown; unset it."),
        (Kind.XPU, "triton", "vLLM runs on XPU here, where that was not shown; unset it."),
    ],
)
def test_the_batch_invariant_mode(
    kind: Kind, asked: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend whose numbers do not depend on the batch is chosen, or the mode is refused."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(device, "kind", lambda: kind)
    monkeypatch.setattr(backends, "load", lambda name, dtype: name)
    config = SimpleNamespace(additional_config={"attnres_backend": asked}, model_config=MODEL)
    if expected in backends.BACKENDS:
        assert backend_choice.choose(config) == (expected, expected)
        assert config.additional_config == {"attnres_backend": expected}
    else:
        with pytest.raises(SettingError, match=f"VLLM_BATCH_INVARIANT is set, .*{expected}"):
            backend_choice.choose(config)


@pytest.fixture
def said(warned: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of one worker on CPU, whose vLLM has no other."""
    from vllm import distributed

    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    monkeypatch.setattr(distributed, "get_world_group", lambda: SimpleNamespace(world_size=1))
    return warned


def test_no_compiler(said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By itself the torch backend is chosen, with one warning; cpp by name is refused."""
    monkeypatch.setattr(cpp_backend, "_ready", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    for given in (None, {"attnres_backend": "auto"}):
        config = SimpleNamespace(additional_config=given, model_config=MODEL)
        assert backend_choice.choose(config) == ("torch", torch_backend)
        assert config.additional_config == {"attnres_backend": "torch"}
        sentence = said.pop()
        assert sentence.startswith(
            "AttnRes runs on the slower torch backend: the C++ backend could"
        )
        assert "install a C++ compiler" in sentence and not said
    config = SimpleNamespace(additional_config={"attnres_backend": "cpp"}, model_config=MODEL)
    with pytest.raises(SettingError, match="install a C\\+\\+ compiler such as g\\+\\+, or choose"):
        backend_choice.choose(config)
    assert not said


@pytest.mark.parametrize(("problem", "eager"), [(None, False), ("why.", True), ("why.", False)])
def test_slower_calls_of_compiled_graphs_are_logged_once(
    problem: str | None, eager: bool, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where there are compiled graphs, and only by the first worker."""
    monkeypatch.setattr(backends, "load", lambda name, dtype: name)
    monkeypatch.setattr(direct, "problem", problem)
    model = SimpleNamespace(**vars(MODEL), enforce_eager=eager)
    for is_first in (True, False):
        monkeypatch.setattr(decoder, "is_first_worker", lambda is_first=is_first: is_first)
        config = SimpleNamespace(additional_config={"attnres_backend": "cpp"}, model_config=model)
        assert backend_choice.choose(config) == ("cpp", "cpp")
    assert [sentence.endswith("slows decode: why.") for sentence in said] == (
        [True] if problem and not eager else []
    )


def test_another_worker_without_a_compiler(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers run on the same backend."""
    monkeypatch.setattr(decoder, "all_workers", lambda flag: False)
    config = SimpleNamespace(additional_config=None, model_config=MODEL)
    assert backend_choice.choose(config) == ("torch", torch_backend)
    (sentence,) = said
    assert "another worker could not load the cpp backend" in sentence


@pytest.fixture
def gpu(said: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A worker on a CUDA device, whose triton backend is that of C++ and does ``fault``."""
    result = SimpleNamespace(capability=(8, 0), fault=lambda: None, said=said)

    def load(name: str, dtype: torch.dtype) -> Any:
        if name == "triton":
            result.fault()
            return cpp_backend
        return f"the {name} backend"

    cpp_backend.prepare()
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    monkeypatch.setattr(backends, "load", load)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: result.capability)
    compare = comparison.difference
    on_cpu = torch.device("cpu")
    monkeypatch.setattr(comparison, "difference", lambda *given: compare(*given[:3], on_cpu))
    model = SimpleNamespace(get_hidden_size=lambda: 96, dtype=torch.bfloat16)
    result.config = SimpleNamespace(additional_config=None, model_config=model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):  # where nothing that is made without a device can be read
            yield result
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_triton_is_chosen_on_a_gpu(gpu: SimpleNamespace, capability: tuple[int, int]) -> None:
    gpu.capability = capability
    assert backend_choice.choose(gpu.config) == ("triton", cpp_backend)
    assert gpu.config.additional_config == {"attnres_backend": "triton"} and not gpu.said


def test_torch_is_chosen_on_an_older_gpu(gpu: SimpleNamespace) -> None:
    gpu.capability = (7, 5)
    assert backend_choice.choose(gpu.config) == ("torch", "the torch backend")
    (sentence,) = gpu.said
    assert sentence.endswith("devices from 8.0 on (compute capability), and this is one of 7.5.")


def test_torch_is_chosen_where_triton_does_not_run(gpu: SimpleNamespace) -> None:
    def fails() -> None:
        raise RuntimeError("PTX was compiled with an unsupported toolchain")

    gpu.fault = fails
    assert backend_choice.choose(gpu.config)[0] == "torch"
    assert "failed on this device (RuntimeError: PTX was compiled with" in gpu.said.pop()
    gpu.config.additional_config = {"attnres_backend": "triton"}
    with pytest.raises(RuntimeError, match="toolchain"):
        backend_choice.choose(gpu.config)


def test_torch_is_chosen_where_triton_is_wrong(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = cpp_backend.single_pass
    monkeypatch.setattr(cpp_backend, "single_pass", lambda *given: own(*given) * 1.1)
    assert backend_choice.choose(gpu.config)[0] == "torch"
    (sentence,) = gpu.said
    assert "wrong on this device: a site by single pass of 96 values in bfloat16 is off by" in (
        sentence
    )


@pytest.mark.parametrize("alone", [True, False])
def test_tokens_are_alone_in_the_batch_invariant_mode(
    gpu: SimpleNamespace, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnres_serve.kernels.triton import common

    monkeypatch.setattr(common, "_each_token_alone", not alone)
    monkeypatch.setattr(host, "batch_invariant", lambda: alone)
    backend_choice.choose(gpu.config)
    assert common.takes_each_token_alone() is alone


@pytest.mark.parametrize("flags", [(True, True), (True, False), (False, True), (False, False)])
def test_workers_agree(flags: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, here in two threads: what is true on one is not enough."""
    from vllm import distributed

    own, store = threading.local(), torch.distributed.HashStore()
    monkeypatch.setattr(distributed, "get_world_group", lambda: own.group)

    def work(rank: int) -> bool:
        gloo = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        own.group = SimpleNamespace(world_size=2, cpu_group=gloo)
        return decoder.all_workers(flags[rank])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [all(flags)] * 2


AMX = """
import ctypes
from attnres_serve.compat.workarounds import amx
def permitted():  # arch_prctl(ARCH_GET_XCOMP_PERM), bit 18: the tile data of AMX
    mask = ctypes.c_ulong(0)
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)) == 0
    return bool(mask.value >> 18 & 1)
before = permitted()
amx.permit_amx()
print(before, permitted())
"""


@pytest.mark.skipif(
    torch.cuda.is_available() or not torch.cpu._is_amx_tile_supported(),
    reason="a processor without AMX, or not the one that computes",
)
def test_amx_is_asked_for():
    """vLLM's attention does not, and the process would end at its first short prompt."""
    assert python(AMX, timeout=300).split()[-2:] == ["False", "True"]
