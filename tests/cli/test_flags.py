"""Flags of vLLM's: their names without its import, and mistyped ones refused in one sentence."""

import argparse
from pathlib import Path

import pytest
from cost import command, of_a_start
from serving import DEMO

from attnres_serve import flags
from attnres_serve.compat import source
from attnres_serve.errors import SettingError

pytest.importorskip("vllm")

KNOWN = {"--max-model-len", "--tensor-parallel-size", "-tp", "-O", "-q", "--enforce-eager"}
KNOWN |= {"--hf-overrides", "--served-model-name"}
KNOWN |= {"--enable-log-requests", "--enable-log-deltas", "--disable-log-stats"}


@pytest.fixture(scope="module")
def vllms_parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Those of its engine and of its server."""
    from vllm import EngineArgs
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    engine, server = FlexibleArgumentParser(), FlexibleArgumentParser()
    return EngineArgs.add_cli_args(engine), make_arg_parser(server)


@pytest.mark.parametrize("which", [0, 1], ids=["engine", "server"])
def test_the_names_are_those_of_vllms_parser(which: int, vllms_parsers: tuple) -> None:
    known = (source.flags_of_engine, source.flags_of_server)[which]()
    assert known is not None
    real = {name for action in vllms_parsers[which]._actions for name in action.option_strings}
    real -= {"-h", "--help", "-O"}
    positive = {name for name in real if not name.startswith("--no-")}
    assert known - {"-O"} == positive
    assert real - positive  # switches
    for name in real - {flags.CONFIG}:
        flags.require_known([name], known)


@pytest.mark.parametrize(
    "words",
    [
        ["--max-model-len", "-1"],
        ["--max_model_len=5"],
        ["--no-enforce-eager", "-tp", "2", "-O3", "-qawq"],
        ["-tp=2", "--hf-overrides.rope_theta", "--a-value", "--hf_overrides.a.b=--x"],
        ["--served-model-name", "-with a space", "b", "--", "-", "-5e3"],
    ],
)
def test_what_vllm_takes_passes(words: list[str]) -> None:
    flags.require_known(words, KNOWN)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-model-lenn", "5"], "found --max-model-lenn, which is no flag; did you mean --max"),
        (["--max-model", "5"], "did you mean --max-model-len?"),
        (["--no-enforce-eagr"], "did you mean --no-enforce-eager?"),
        (["--hf-override.a", "1"], "did you mean --hf-overrides?"),
        (["-tpp", "2"], "did you mean -tp?"),
        (["--disable-log-requests"], "did you mean --no-enable-log-requests?"),
        (["--no-disable-log-requests"], "did you mean --enable-log-requests?"),
        (["--enable-log-stats"], "did you mean --no-disable-log-stats?"),
        (["--enable-log-request"], "did you mean --enable-log-requests?"),
        (["--ours-als"], "did you mean --ours-also?"),
        (["--max-model-len", "5", "--quite-another"], "--help=all"),
    ],
)
def test_a_flag_that_there_is_not(words: list[str], said: str) -> None:
    with pytest.raises(SettingError) as refused:
        flags.require_known(words, KNOWN, {"--ours-also"})
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dtype", "float17"], "found --dtype float17; expected one of auto, bfloat16, float, "),
        (["--enforce-eager", "--kv_cache_dtype=fp9"], "found --kv-cache-dtype fp9; expected one"),
        (["--load-format=a", "--tokenizer-mode", "x", "--dtype=int8"], "found --dtype int8; "),
        (["--dtype", "--load-format=auto"], "found --dtype without a value; expected one of auto"),
    ],
)
def test_a_value_that_a_flag_does_not_take(words: list[str], said: str) -> None:
    known = source.flags_of_engine()
    with pytest.raises(SettingError, match=said):
        flags.require_known(words, known, (), source.choices)


def test_the_values_are_those_of_vllms_parser(vllms_parsers: tuple) -> None:
    real = {
        name: sorted(str(value) for value in action.choices if value is not None)
        for action in vllms_parsers[0]._actions
        if action.choices
        for name in action.option_strings
    }
    found = {name: listed for name in real if (listed := source.choices(name))}
    assert found == {name: real[name] for name in found}
    assert {"--dtype", "--kv-cache-dtype", "--distributed-executor-backend"} & {*found}
    others = source.flags_of_engine() - {*real}
    assert not any(source.choices(name) for name in others)


def test_a_platform_of_another_package_may_add_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [group])
    assert source.flags_of_engine() is None
    assert source.flags_of_server() is None


def test_a_file_of_flags_is_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("max-model-len: 64\nenforce_eager: false\nserved-model-name: [a, b]\n")
    words = ["--config", str(path), "--max-model-len", "32"]
    flags.require_known(words, KNOWN)
    assert flags.value_of("--max-model-len", flags.with_config(words)) == "32"
    assert flags.value_of("--max-model-len", flags.with_config(words[:2])) == "64"
    path.write_text("max-model-lenn: 64\n")
    with pytest.raises(SettingError, match=r"found --max-model-lenn in .*serve.yaml, .*-len\?"):
        flags.require_known(words, KNOWN)


@pytest.mark.parametrize(
    ("words", "content", "said"),
    [
        (["--config=serve.yaml"], "port: 1", "expected --config FILE once, with a space"),
        (["--config"], "port: 1", "expected --config FILE once"),
        (["--config", "serve.json"], "port: 1", "ends with .yaml"),
        (["--config", "serve.yaml", "--config", "serve.yaml"], "port: 1", "once"),
        (["--config", "serve.yaml"], "", "holds no flags"),
        (["--config", "serve.yaml"], "a: [", "cannot be read"),
        (["--config", "another.yaml"], "port: 1", "cannot be read"),
    ],
)
def test_a_file_of_flags_at_which_vllm_would_fail(
    words: list[str], content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serve.yaml").write_text(content)
    with pytest.raises(SettingError, match=said):
        flags.require_known(words, KNOWN)


@pytest.mark.parametrize("which", ["serve", "inspect"])
def test_a_mistyped_flag_costs_no_start(which: str) -> None:
    prompt = ["--prompt", "x"] if which == "inspect" else []
    status, said, seconds = command(which, DEMO, *prompt, "--max-num-seqz", "5")
    expected = "found --max-num-seqz, which is no flag; did you mean --max-num-seqs?"
    assert (status, said) == (2, f"attnres-serve: {expected}\n")
    assert seconds < of_a_start()


@pytest.mark.parametrize(
    "value",
    ['{"method": "ngram", "num_speculative_tokens": 3}', "a folder/with spaces", "-x y", "a=b c"],
)
def test_a_value_behind_an_equals_sign_may_have_spaces(value):
    """As for argparse, which takes a word with a space for no flag only if it has no such sign."""
    assert flags.value_of("--one-of-vllm", ["--before", f"--one_of_vllm={value}"]) == value
