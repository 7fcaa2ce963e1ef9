"""Sizes and numbers of blocks of the KV cache that vLLM refuses on a CPU, refused at once."""

import pytest
from checkpoints import write_house
from facts import FACTS

from attnres_serve.checkpoints import blocks, cache
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.compat import device, source, versions
from attnres_serve.compat.arguments import of_server
from attnres_serve.compat.device import Kind
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.server.start import facts
from attnres_serve.start import memory

CONTEXT = 512  # of a tiny checkpoint


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: Kind.CPU)
    monkeypatch.setattr(source, "block_step", lambda: 32)
    monkeypatch.setattr(source, "has_amx", lambda: False)


def check(folder, base: str, words: str) -> None:
    parsed = check_folder(write_house(folder, base, block_size=2)).translated("m")
    blocks.check("m", parsed, of_server(words.split()))


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("llama", "--block-size 16"),
        ("llama", "--block-size=100"),
        ("llama", "--block_size 0"),
        ("llama", "--block-size -32"),
        ("qwen3_next", "--block-size 0"),
        ("llama", "--num-gpu-blocks-override 2"),
        ("llama", "--num-gpu-blocks-override 4"),
        ("llama", "--num-gpu-blocks-override 0"),
        ("llama", "--num-gpu-blocks-override 1 --max-model-len 128"),
        ("llama", "--num-gpu-blocks-override 8 --block-size 32"),
        ("deepseek_v2", "--num-gpu-blocks-override 8"),
        ("qwen3_next", "--num-gpu-blocks-override 1"),
    ],
)
def test_blocks_that_hold_no_context_are_refused(base, words, tmp_path, sentence) -> None:
    sentence.raises(SettingError, check, tmp_path, base, words)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("llama", ""),
        ("llama", "--block-size 32"),
        ("llama", "--block-size 256"),
        ("llama", "--num-gpu-blocks-override 5"),
        ("llama", "--num-gpu-blocks-override 2 --max-model-len auto"),  # vLLM takes what fits
        ("llama", "--num-gpu-blocks-override 2 --max-model-len -1"),
        ("llama", "--num-gpu-blocks-override 2 --hf-overrides {}"),
        ("llama", "--num-gpu-blocks-override 2 --max-model-len 128"),
        ("llama", "--num-gpu-blocks-override None"),
        ("deepseek_v2", "--block-size 100"),  # vLLM makes 16 of it
        ("deepseek_v2", "--num-gpu-blocks-override 33"),
        ("qwen3_next", "--block-size 16"),  # vLLM aligns it with the states
        ("qwen3_next", "--num-gpu-blocks-override 2"),
        ("gated_deltanet", "--block-size 7 --num-gpu-blocks-override 1"),  # it has no KV cache
    ],
)
def test_others_are_left_to_vllm(base, words, tmp_path) -> None:
    check(tmp_path, base, words)


def test_blocks_of_another_device_are_left_to_vllm(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(device, "kind", lambda: Kind.CUDA)
    check(tmp_path, "llama", "--block-size 16 --num-gpu-blocks-override 1")


@pytest.mark.parametrize(("more", "is_enough"), [(-1, False), (0, True)])
def test_a_cache_holds_a_context_in_whole_blocks_and_one_more(
    more, is_enough, tmp_path, monkeypatch, sentence
) -> None:
    """vLLM ends with `0.0 GiB KV cache is needed, which is larger than ... 0.0 GiB`."""
    monkeypatch.setattr(memory, "left", lambda: 2**36)
    monkeypatch.setattr(memory, "left_on_a_node", lambda: 2**36)
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    checkpoint = check_folder(write_house(tmp_path, "llama", block_size=2))
    parsed = checkpoint.translated("m")
    token = FAMILIES["llama"].cache_elements(parsed.config) * 4
    size = (CONTEXT + blocks.USUAL) * token + more
    words = ["--dtype", "float32", "--kv-cache-memory-bytes", str(size)]
    if is_enough:
        result = cache.of("m", parsed, of_server(words))
        assert result is not None and result.size == size
    else:
        sentence.raises(CheckpointError, cache.of, "m", parsed, of_server(words))


@pytest.mark.skipif(not versions.installed()[0], reason="reads vLLM's source")
def test_the_step_is_that_of_the_installed_vllm(monkeypatch) -> None:
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.undo()
    listed = cpu_attn.CPUAttentionBackend.get_supported_kernel_block_sizes()
    steps = [size.base for size in listed if hasattr(size, "base")]
    assert steps == [source.block_step()]


@pytest.mark.parametrize("base", [name for name, family in FAMILIES.items() if family.is_stock])
def test_a_start_says_where_prefixes_are_not_cached(base, tmp_path) -> None:
    """On a CPU; what the engine does is in the tests of families."""
    parsed = check_folder(write_house(tmp_path, base, block_size=2)).translated("m")
    message = facts.of_checkpoint("m", parsed, None).get("prefixes", "")
    assert message.startswith("not cached, as vLLM ") == (not FACTS[base].caches_prefixes)
