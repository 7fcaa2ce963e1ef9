"""Tensors under names of a trainer's own: said at once, with the ``--rename`` that helps.

Every guess is judged by the file that was renamed: the advised command must bring it back.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    GOLDENS,
    edit,
    write_alice_ai,
    write_baseline,
    write_fla,
    write_house,
    write_mode,
    write_nanogpt,
    write_standard,
)
from on_file import Sentence
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnres_serve import cli
from attnres_serve.checkpoints.checked import check_folder

WEIGHTS = "model.safetensors"
Table = dict[str, str]
Tensors = dict[str, Tensor]

META: Table = {  # of Meta's Llama
    r"^model\.layers": "layers",
    r"self_attn\.([qkvo])_proj": r"attention.w\1",
    r"mlp\.gate_proj": "feed_forward.w1",
    r"mlp\.down_proj": "feed_forward.w2",
    r"mlp\.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    r"model\.embed_tokens": "tok_embeddings",
    r"^model\.norm": "norm",
    "lm_head": "output",
}
QUERIES: Table = {
    "self_attention_res_norm": "attn_key_norm",
    "mlp_res_norm": "ffn_key_norm",
    r"self_attention_res_proj\.weight": "attn_query",
    r"mlp_res_proj\.weight": "ffn_query",
    r"model\.output_attn_res_proj": "final_query",
    r"model\.output_attn_res_norm": "final_key_norm",
}
EXPERTS: Table = {r"mlp\.experts": "moe.experts", r"mlp\.gate\.": "moe.router."}


def renamed(tensors: Tensors, table: Table) -> Tensors:
    result = {}
    for own, tensor in tensors.items():
        name = own
        for pattern, replacement in table.items():
            name = re.sub(pattern, replacement, name)
        result[name] = tensor
    assert len(result) == len(tensors)
    return result


def rename(folder: Path, table: Table) -> Tensors:
    """Give a checkpoint's tensors other names; returns them by the ones that they had."""
    tensors = load_file(folder / WEIGHTS)
    save_file(renamed(tensors, table), folder / WEIGHTS, metadata={"format": "pt"})
    return tensors


def own(tmp_path: Path, table: Table, layers: int = 2) -> Path:
    """A Llama whose tensors have other names."""
    folder = write_house(tmp_path / "own", layers=layers, block_size=2)
    rename(folder, table)
    return folder


def packed_moe(folder: Path) -> Path:
    """A mixture whose experts are packed as in memory."""
    write_house(folder, "qwen3_moe", layers=4, block_size=3)
    tensors, layers = load_file(folder / WEIGHTS), {}
    pattern = r"(.+\.experts)\.(\d+)\.(\w+)_proj\.weight"
    for name in [one for one in tensors if ".experts." in one]:
        stem, number, part = re.fullmatch(pattern, name).groups()
        layers.setdefault(stem, {})[int(number), part] = tensors.pop(name)
    for stem, parts in layers.items():
        count = range(len(parts) // 3)
        both = [torch.cat([parts[n, "gate"], parts[n, "up"]]) for n in count]
        tensors[f"{stem}.gate_up_proj"] = torch.stack(both)
        tensors[f"{stem}.down_proj"] = torch.stack([parts[n, "down"] for n in count])
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    check_folder(folder)
    return folder


@pytest.fixture
def refused(capfd: pytest.CaptureFixture, sentence: Sentence) -> Callable[..., str]:
    """Run a command that is refused in one bounded line; returns the whole sentence, on file."""

    def run(*words: object) -> str:
        capfd.readouterr()
        assert cli.main([*map(str, words)]) == (1 if words[0] == "check" else 2)
        _, err = capfd.readouterr()
        assert err.count("\n") == 1 and len(err) <= 600
        return sentence.check(err)

    return run


def advised(message: str, target: Path) -> list[str]:
    """The words of the command that a sentence advises."""
    (command,) = re.findall(r"`attnres-serve (.+?)`", message)
    return [str(target) if word == "DST" else word for word in shlex.split(command)]


# What is written, and how its names change.
CASES: dict[str, tuple[Callable[[Path], Any], Table]] = {
    "llama": (lambda f: write_house(f, layers=3, block_size=2), META),
    "llama and its queries": (lambda f: write_house(f, layers=3, block_size=2), META | QUERIES),
    "norms of heads": (
        lambda f: write_house(f, "qwen3", layers=3, block_size=2),
        {"q_norm": "query_norm", "k_norm": "key_norm"},
    ),
    "key norms of sites": (
        lambda f: write_house(f, "qwen3", layers=3, block_size=2),
        {"_res_norm": "_depth_key_norm", "q_norm": "query_norm", "k_norm": "key_norm"},
    ),
    "queries that are called AttnRes": (
        lambda f: write_house(f, layers=3, block_size=2),
        {"self_attention_res_": "attn_attnres_", "mlp_res_": "mlp_attnres_"},
    ),
    "bias": (
        lambda f: write_house(f, "qwen2", layers=3, block_size=2),
        {r"self_attn\.([qkv])_proj": r"self_attn.\1"},
    ),
    "mixture": (lambda f: write_house(f, "qwen3_moe", layers=4, block_size=3), EXPERTS),
    "packed mixture": (
        packed_moe,
        {r"experts\.gate_up_proj": "experts.w13", r"experts\.down_proj": "experts.w2"},
    ),
    "fla": (
        write_fla,
        {
            r"attn\.([qkvo])_proj": r"attention.w\1",
            r"model\.embeddings": "model.wte",
            "attn_norm": "norm_attn",
            "mlp_norm": "norm_mlp",
        },
    ),
    "nanogpt": (
        write_nanogpt,
        {
            "c_attn": "qkv",
            r"attn\.c_proj": "attn.out",
            "c_gate": "gate",
            "c_val": "up",
            r"mlp\.c_proj": "mlp.down",
            "ln_1": "ln_attn",
            "ln_2": "ln_mlp",
            "attn_res_q1": "attn_query",
            "attn_res_q2": "mlp_query",
        },
    ),
    "delta_attnres": (write_mode, {r"model\.layers": "model.blocks", r"model\.norm": "model.ln_f"}),
    "baseline_attnres": (
        write_baseline,
        {"pseudo_query": "w", "attnres_mlp_aggregator": "mlp_depth"},
    ),
    "alice_ai": (
        lambda f: write_alice_ai(f, layers=4, per_block=2),
        {"attn_res_norm_weight": "attn_depth_norm", "a_log_bias": "decay"},
    ),
    "four norms": (
        lambda f: write_house(f, "gemma3_text", layers=4, block_size=2),
        {
            "input_layernorm": "pre_attn_norm",
            "post_attention_layernorm": "post_attn_norm",
            "pre_feedforward_layernorm": "pre_ffn_norm",
            "post_feedforward_layernorm": "post_ffn_norm",
        },
    ),
    "w1, w2 and w3 of the format": (
        lambda f: write_house(f, "mixtral", layers=4, block_size=2),
        {
            "block_sparse_moe": "moe",
            r"\bw1\b": "gate_proj",
            r"\bw2\b": "down_proj",
            r"\bw3\b": "up",
        },
    ),
    "layers of two kinds": (
        lambda f: write_house(f, "deepseek_v3", layers=4, block_size=2),
        {"self_attn": "attention", "layernorm": "norm", "mlp": "ffn", "lm_head": "head"},
    ),
    "one": (lambda f: write_house(f, layers=3, block_size=2), {"lm_head": "output"}),
    "one layer": (lambda f: write_house(f, layers=1, block_size=2), META),
    "numbers in words": (
        lambda f: write_house(f, layers=3, block_size=2),
        {r"model\.layers\.": "block"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_advised_renames(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    """All at once, in the format's own names, and the advised command brings every bit back."""
    write, table = CASES[case]
    folder, target = tmp_path / "own", tmp_path / "target"
    write(folder)
    expected = rename(folder, table)
    for command in ("check", "serve"):
        message = refused(command, folder)
    words = advised(message, target)
    assert words[:3] == ["convert", str(folder), str(target)]
    assert words[3::2] == ["--rename"] * len(words[4::2])
    assert cli.main(words) == 0
    assert (target / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    actual = load_file(target / WEIGHTS)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    assert check_folder(target).parsed is not None
    assert cli.main([*words[:2], str(tmp_path / "house"), *words[3:], "--to", "house"]) == 0
    assert check_folder(tmp_path / "house").translated("house").format == "house"


def test_pickles_shards_and_files_beside_them(tmp_path: Path) -> None:
    folder = write_house(tmp_path / "own", layers=2, block_size=2)
    expected = rename(folder, {"lm_head": "output"})
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    words = ["convert", str(folder), str(tmp_path / "t"), "--rename", "output=lm_head"]
    assert cli.main(words) == 0
    assert load_file(tmp_path / "t" / WEIGHTS).keys() == expected.keys()


def test_a_plain_model_that_gets_queries(tmp_path: Path, refused: Callable[..., str]) -> None:
    """The advised command still asks for them."""
    folder = write_standard(tmp_path / "own")
    rename(folder, META)
    message = refused("convert", folder, tmp_path / "t", "--add-zero-queries", "--block-size", "2")
    words = advised(message, tmp_path / "t")
    assert "--add-zero-queries" in words and "output=lm_head" in words
    assert cli.main(words) == 0
    assert check_folder(tmp_path / "t").parsed is not None


def test_renames_that_were_given_stay_in_the_advice(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    """Later renames read what earlier ones left, so the advised command is the whole one."""
    folder = own(tmp_path, META | {r"^": "actor."})
    given = ("--to", "house", "--rename", "actor.output=lm_head", "--rename", "actor.*=*")
    message = refused("convert", folder, tmp_path / "t", *given)
    words = advised(message, tmp_path / "t")
    assert words[3:9] == [*given] and len(words) > 9
    assert cli.main(words) == 0


# --- what is not guessed

BLIND: Table = {
    r"self_attn\.q_proj": "a.one",
    r"self_attn\.o_proj": "a.two",
    r"self_attn\.k_proj": "a.three",
    r"self_attn\.v_proj": "a.four",
}
AMBIGUOUS: dict[str, Table] = {
    "queries and output": BLIND,
    "gate and up": {r"mlp\.gate_proj": "mlp.fc1", r"mlp\.up_proj": "mlp.fc2"},
    "gate and up by w1 and w2": {
        r"mlp\.gate_proj": "ff.w2",
        r"mlp\.up_proj": "ff.w1",
        r"mlp\.down_proj": "ff.w3",
    },
    "norms by number": {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"},
    "key norms by number": {"self_attention_res_norm": "kn.0", "mlp_res_norm": "kn.1"},
}


@pytest.mark.parametrize("case", AMBIGUOUS)
def test_several_of_one_shape_without_likeness(
    case: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    """They are named as ambiguous, and no rename of them is advised."""
    refused("check", own(tmp_path, AMBIGUOUS[case], layers=3))


def test_a_turned_guess_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Whatever is asked for, the result is checked as any checkpoint."""
    folder = own(tmp_path, {r"mlp\.down_proj": "mlp.out"})
    layers = "model.layers.*"
    for new in ("mlp.up_proj", "mlp.other"):
        option = f"{layers}.mlp.out={layers}.{new}"
        refused("convert", folder, tmp_path / "t", "--rename", option)
    edit(folder, lambda t: t.update({n: v.T for n, v in t.items() if ".mlp.out." in n}))
    option = f"{layers}.mlp.out={layers}.mlp.down_proj"
    refused("convert", folder, tmp_path / "t", "--rename", option)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    "option",
    [
        *("output", "=lm_head", "output=", "layers.*=model.layers", "head=lm_head", "outp=lm_head"),
        *("utput.weight=lm_head.weight", "model.norm=output", "model.layers.*=model.layer"),
        "model.*.mlp=model.*.mlp",
    ],
)
def test_renames_that_are_refused(option: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    folder = own(tmp_path, {"lm_head": "output"})
    refused("convert", folder, tmp_path / "t", "--rename", option)


# --- what is another configuration, or another function, all the same


OTHERS: dict[str, tuple[Table, dict[str, Any]]] = {
    "nothing of a shape": ({r"mlp\.(\w+)_proj": r"ff.\1"}, {"intermediate_size": 40}),
    "a tensor that fits nothing": (
        {"lm_head": "output"},
        {"tensors": lambda t: t.update({"value_head.weight": torch.zeros(1, 7)})},
    ),
    "another layer": ({r"model\.layers\.1\.mlp\.down_proj": "model.layers.0.mlp.extra_down"}, {}),
    # A gate has the shape of a key norm.
    "another function by its name": ({"mlp_res_norm": "mlp_attn_res_gate"}, {}),
    "many are counted": (
        {},
        {"tensors": lambda t: [t.pop(name) for name in [*t] if ".mlp.up_proj" in name]},
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_other_name(case: str, tmp_path: Path, refused: Callable[..., str]) -> None:
    table, changes = OTHERS[case]
    refused("check", edit(own(tmp_path, table, layers=3), **changes))


def test_json_has_the_whole_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = own(tmp_path, META, layers=3)
    assert cli.main(["check", str(folder), "--json"]) == 1
    reason = json.loads(capsys.readouterr().out)["reason"]
    assert cli.main(advised(reason, tmp_path / "t")) == 0


def test_goldens_keep_their_names(tmp_path: Path) -> None:
    """A rename of one tensor leaves the function as it was."""
    words = ["convert", str(GOLDENS / "nanogpt_block"), str(tmp_path / "a")]
    assert cli.main([*words, "--rename", "transformer.ln_f=model.norm"]) == 0
    assert "model.norm.weight" in load_file(tmp_path / "a" / WEIGHTS)
