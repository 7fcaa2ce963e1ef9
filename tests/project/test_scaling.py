"""docs/use/scaling.md: its sizes by the code of ``check``, its commands by vLLM's own parser."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnres_serve.checkpoints.check import describe
from attnres_serve.checkpoints.checked import check_content
from attnres_serve.checkpoints.files import Header
from attnres_serve.checkpoints.names import expected_parts, tensor_name
from attnres_serve.compat import token_shards
from attnres_serve.families import FAMILIES
from attnres_serve.formats.resolve import resolve
from attnres_serve.sentences import amount

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "scaling.md").read_text()
BLOCKS = 8
STEP = 8192  # tokens

SHAPES = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}


def facts(name: str) -> dict:
    """What ``check`` says of a checkpoint of that shape, of which only headers are made."""
    layers = SHAPES[name]["num_hidden_layers"]
    config = {
        "model_type": "attnres_qwen3",
        "architectures": ["AttnResQwen3ForCausalLM"],
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "attn_res": {"block_size": 2 * layers // BLOCKS},
        **SHAPES[name],
    }
    parsed = resolve(config)
    file = Path("model.safetensors")
    headers = {
        tensor: Header(shape, "BF16", file)
        for tensor, shape in FAMILIES[parsed.family].shapes(parsed.config).items()
    }
    for site, part in expected_parts(parsed.spec):
        headers[tensor_name(site, part, parsed.layout)] = Header(
            (config["hidden_size"],), "F32", file
        )
    return describe(check_content(config, lambda: headers))


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_sizes(name):
    found = facts(name)
    assert found["blocks"] == BLOCKS
    bank = found["bank_bytes_per_token"]
    assert bank == (BLOCKS + 1) * found["hidden_size"] * 2  # the formula of the page
    (row,) = re.findall(rf"^\| {re.escape(name)}: [^|]*\|(.*)\|$", PAGE, re.M)
    assert [cell.strip() for cell in row.split("|")] == [
        amount(found["weights_bytes"]),
        amount(found["kv_cache_bytes_per_token"]),
        amount(bank),
        amount(STEP * bank),
    ]


def test_the_table_of_sharded_sites():
    """The sizes of the 8B; ``test_parallel`` counts those of a step."""
    found = facts("Qwen3-8B")
    collectives, bank = (
        re.findall(rf"^\| {row}, sharded \|.*?\|(.*?)\|", PAGE, re.M)[0].strip()
        for row in ("collectives of a step", "bank of 8192 tokens")
    )
    sites = 2 * SHAPES["Qwen3-8B"]["num_hidden_layers"]
    assert collectives == f"{sites} of each for {sites}"
    config = SimpleNamespace(
        additional_config={"attnres_shard_sites": "on"},
        scheduler_config=SimpleNamespace(max_num_batched_tokens=STEP),
        parallel_config=SimpleNamespace(),
    )
    sizes = []
    for config.parallel_config.tensor_parallel_size in (2, 4, 8):
        tokens = token_shards.most(config)
        sizes.append(f"{tokens * found['bank_bytes_per_token'] / 1e6:.0f}")
    assert bank == f"{', '.join(sizes)} MB"


def test_the_commands_are_ones_that_vllm_takes():
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    text = PAGE.replace("\\\n", " ")
    commands = re.findall(r"^attnres-serve serve CHECKPOINT(.*?)(?:#.*)?$", text, re.M)
    assert len(commands) == 6
    for command in commands:
        parser.parse_args(["--model", "x", *shlex.split(command)])
