"""The KV cache that ``serve`` takes on a CPU: large enough for the model, and never the machine."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkpoints import write_house
from serving import free_port

from attnres_serve import cli
from attnres_serve.checkpoints import cache
from attnres_serve.checkpoints.check import describe
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.compat import device, openai_server
from attnres_serve.compat.arguments import of_server
from attnres_serve.compat.device import Kind
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.formats.resolve import resolve
from attnres_serve.start import events, memory

GIB = 2**30
TOKEN = 8 * 2 * 4 * 128 * 2  # bytes: layers, keys and values, heads, their size, bfloat16
CONFIG: dict[str, Any] = {
    "model_type": "attnres_qwen3",
    "architectures": ["AttnResQwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2**17,  # 2 GiB of cache
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "attn_res": {"block_size": 4},
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with 64 GiB free, and nothing said about the cache."""
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    has_free(monkeypatch, 64)


def has_free(monkeypatch: pytest.MonkeyPatch, left: float, on_a_node: float | None = None) -> None:
    monkeypatch.setattr(memory, "left", lambda: int(left * GIB))
    monkeypatch.setattr(memory, "left_on_a_node", lambda: int((on_a_node or left) * GIB))


def of(*words: str, **changes: Any) -> cache.Cache | None:
    return cache.of("m", resolve(CONFIG | changes), of_server(words))


@pytest.mark.parametrize(
    ("left", "node", "words", "gib", "workers", "tokens"),
    [
        (64, None, "", 8, 1, 2**19),  # four contexts
        (64, None, "--max-model-len 1024", 1, 1, 2**16),  # at least 1 GiB
        (20, None, "", 5, 1, 5 * 2**16),  # at most a quarter of what is free
        (3, None, "--max-model-len 1k", 0.75, 1, 3 * 2**14),
        (64, 16, "", 4, 1, 2**18),  # a worker's memory is that of one node
        (64, None, "-pp 2", 4, 2, 2**19),  # half of the layers each
        (64, None, "--tensor-parallel-size 4", 2, 4, 2**19),  # a head each
        (64, None, "-tp=8", 2, 8, 2**19),  # two have the same head
        (64, 64, "-dp 3", 16 / 3, 3, 2**18 * 4 / 3),  # each engine has a cache of its own
        (64, None, "-pp 2 --nnodes 2", 4, 1, 2**19),
        (64, None, "--dtype float32", 16, 1, 2**19),
        (64, None, "--kv-cache-dtype fp8_e5m2", 4, 1, 2**19),
    ],
)
def test_a_few_contexts_and_at_most_a_quarter(
    left, node, words, gib, workers, tokens, monkeypatch
) -> None:
    has_free(monkeypatch, left, node)
    result = of(*words.split())
    assert result is not None and result.is_chosen
    assert result.workers == workers
    assert result.size == pytest.approx(gib * GIB, abs=1)
    assert result.tokens == pytest.approx(tokens, abs=1)
    assert result.size * workers <= left * GIB / 4


@pytest.mark.parametrize("base", ["mamba2", "qwen3_next"])
def test_states_of_recurrent_layers_count(base, tmp_path) -> None:
    """They are as large for a short sequence as for a long one."""
    facts = describe(checkpoint := check_folder(write_house(tmp_path, base, block_size=1)))
    result = cache.of("m", checkpoint.translated("m"), of_server(["--max-model-len", "64"]))
    need = 64 * facts["kv_cache_bytes_per_token"] + facts["state_bytes_per_sequence"]
    assert result is not None and facts["state_bytes_per_sequence"] > 0
    assert result.tokens == result.size * 64 // need


@pytest.mark.parametrize(
    ("space", "words", "size"),
    [
        ("3", "", 3 * GIB),
        (" 3 ", "--kv-cache-memory-bytes 5G", 3 * GIB),  # as vLLM has it
        ("", "--kv-cache-memory-bytes 5G", 5 * GIB),
        (None, "--kv-cache-memory-bytes=4.5g", 4_500_000_000),
        (None, "--kv_cache_memory_bytes 4096M", 4 * GIB),
    ],
)
def test_what_is_said_is_told(space, words, size, monkeypatch) -> None:
    if space is not None:
        monkeypatch.setenv(cache.VARIABLE, space)
    result = of(*words.split())
    assert result is not None and (result.size, result.is_chosen) == (size, False)
    assert result.tokens == size // TOKEN


@pytest.mark.parametrize(
    "words", ["--gpu-memory-utilization 0.3", "--num-gpu-blocks-override=64", "-tp 2"]
)
def test_what_vllm_measures_is_not_told(words, monkeypatch) -> None:
    """On a GPU, or where a share of the memory is asked for."""
    if words.startswith("-tp"):
        monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    assert of(*words.split()) is None


@pytest.mark.parametrize(
    ("left", "space", "words"),
    [
        (6, None, ""),
        (1, None, ""),
        (64, "1", ""),
        (64, None, "--kv-cache-memory-bytes 1k --max-model-len 4096"),
        (6, None, "-pp 2"),
    ],
)
def test_a_cache_below_one_context_is_refused(left, space, words, monkeypatch, sentence) -> None:
    """vLLM would say so after the weights were loaded."""
    has_free(monkeypatch, left)
    if space:
        monkeypatch.setenv(cache.VARIABLE, space)
    sentence.raises(CheckpointError, of, *words.split())


def test_windows_leave_the_judgement_to_vllm(monkeypatch) -> None:
    """A layer with a window caches no more than the window."""
    has_free(monkeypatch, 6)
    window = {"use_sliding_window": True, "sliding_window": 1024}
    result = of(**window, layer_types=["sliding_attention"] * 8)
    assert result is not None and result.tokens < CONFIG["max_position_embeddings"]


@pytest.mark.parametrize(
    ("space", "words"),
    [
        # What vLLM cannot read.
        *((value, "") for value in ("1GiB", "0.25", "-1", "0", "4G", "zwei", "1_000")),
        # More than is free.
        *(("65", ""), ("40", "-pp 2"), ("", "--kv-cache-memory-bytes 1T")),
    ],
)
def test_sizes_that_are_refused(space, words, monkeypatch, sentence) -> None:
    monkeypatch.setenv(cache.VARIABLE, space)
    sentence.raises(SettingError, of, *words.split())


@pytest.mark.parametrize("space", [None, "", "2"])
def test_serve_hands_it_to_vllm_and_check_tells_the_same(
    space, monkeypatch, capfd, tmp_path
) -> None:
    given: list[tuple] = []
    reported: list[dict] = []
    monkeypatch.setattr(events, "tell", lambda _, **facts: reported.append(facts))
    monkeypatch.setattr(openai_server, "run_server", lambda *arguments: given.append(arguments))
    if space is not None:
        monkeypatch.setenv(cache.VARIABLE, space)
    folder = str(write_house(tmp_path, block_size=2))
    assert cli.main(["check", folder, "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    size = int(space or 1) * GIB
    assert facts["cache_bytes"] == size
    assert facts["cache_tokens"] == size // facts["kv_cache_bytes_per_token"]
    assert cli.main(["check", folder]) == 0
    assert f"cache here    {facts['cache']}, which `serve` takes" in capfd.readouterr().out
    assert cli.main(["serve", folder, "--port", str(free_port())]) == 0
    (shown,) = [one["facts"]["KV cache"] for one in reported if "KV cache" in one.get("facts", {})]
    assert shown == facts["cache"]
    ((_, defaults, *_),) = given
    assert defaults.get("kv_cache_memory_bytes") == (None if space else size)


def test_check_says_what_serve_would_refuse(monkeypatch, capfd, tmp_path) -> None:
    folder = str(write_house(tmp_path, block_size=2))
    has_free(monkeypatch, 2**-20)
    for words in (["check", folder], ["check", folder, "--json"], ["serve", folder]):
        assert cli.main(words) == (2 if words[0] == "serve" else 1)
        out, err = capfd.readouterr()
        assert "needs 240.0 KiB of KV cache" in err
        if "--json" in words:
            facts = json.loads(out)
            assert not facts["served"] and facts["reason"] in err and facts["layers"] == 3


# What is free.


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


@pytest.fixture
def groups(monkeypatch, tmp_path) -> Path:
    monkeypatch.undo()
    monkeypatch.setattr(memory, "SYSTEM", tmp_path / "groups")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "mine")
    monkeypatch.setattr(memory, "NODES", tmp_path / "nodes")

    class Machine:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", lambda: Machine)
    return tmp_path / "groups"


def test_no_limit(groups) -> None:
    assert memory.left() == memory.left_on_a_node() == 1000  # no file of groups
    (groups.parent / "mine").write_text("4:memory:/a\n0::/a/b\n")
    write(groups / "a" / "b", memory__max="max", memory__current=5)
    write(groups / "memory" / "a", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=5)
    assert memory.left() == 1000


@pytest.mark.parametrize(
    ("mine", "place", "file", "is_counted"),
    [
        ("0::/a", "a", "memory__events", True),
        ("0::/", "", "memory__events", True),
        ("0::/../../a", "", "memory__events", True),  # a container's own group is its top
        ("4:memory:/a", "memory/a", "memory__oom_control", True),
        ("4:memory:/host/a", "memory", "memory__oom_control", True),
        ("0::/a/b", "a", "memory__events", False),  # of others in the group above, too
        ("4:cpu:/a", "a", "memory__events", False),
    ],
)
def test_kills_for_want_of_memory(groups, mine, place, file, is_counted) -> None:
    (groups.parent / "mine").write_text(f"{mine}\n")
    (groups / "a" / "b").mkdir(parents=True)
    assert memory.oom_kills() is None
    write(groups / place, **{file: "oom 5\noom_kill_disable 0\noom_kill 3\noom_group_kill 1"})
    assert memory.oom_kills() == (3 if is_counted else None)


@pytest.mark.parametrize("path", ["/", "/a", "/a/b", "/../../a/b"])
def test_limits_of_every_group_above_count(groups, path) -> None:
    """Of a container, which may see its own group as the top, and of a service inside a slice."""
    (groups.parent / "mine").write_text(f"0::{path}\n")
    here = groups if path in ("/", "/../../a/b") else groups / "a"
    write(here, memory__max=500, memory__current=300, memory__stat="anon 1\ninactive_file 40")
    assert memory.left() == 240  # files that were read are given back
    write(groups / "a" / "b", memory__max=90, memory__current=100)
    assert memory.left() == (0 if path == "/a/b" else 240)


def test_limits_of_the_first_version_count(groups) -> None:
    (groups.parent / "mine").write_text("9:name=systemd:/x\n4:cpu,memory:/a/b\n0::/\n")
    write(
        groups / "memory" / "a",
        memory__limit_in_bytes=600,
        memory__usage_in_bytes=100,
        memory__stat="inactive_file 300\ntotal_inactive_file 50",
    )
    assert memory.left() == 550


def test_the_node_with_the_least_memory_counts(groups) -> None:
    line = "Node {0} MemFree: {1} kB\nNode {0} Active(file): 1 kB\nNode {0} Inactive(file): 0 kB"
    for node, free, processors in ((0, 0.5, "0-3"), (1, 0.25, "4-7"), (2, 0.0, "")):
        sizes = line.format(node, int(free * 4)) + f"\nNode {node} SReclaimable: 0 kB"
        write(groups.parent / "nodes" / f"node{node}", meminfo=sizes, cpulist=processors)
    psutil.virtual_memory().available = 10**6
    assert memory.left_on_a_node() == 2 * 1024
