"""vLLM's flags by our table and by vLLM's own parser; what it would refuse, in one sentence."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from cost import command, of_a_start
from serving import DEMO

from attnres_serve.compat import arguments, versions
from attnres_serve.compat.arguments import Arguments, among, of_engine, of_serve, of_server
from attnres_serve.compat.flags import kinds, parser, spelling, table
from attnres_serve.compat.flags.flag import ADAPTERS, SWITCH, Flag
from attnres_serve.errors import SettingError

pytest.importorskip("vllm")

# Words for values of each kind: some that vLLM takes, and some that it refuses.
WORDS = {
    "text": ["a", "a b", "1", "None", "", "-1", "a=b", "a.b"],
    "integer": ["1", " 7 ", "0", "-3", "1_000", "two", "4k", "1.5", "None", ""],
    "number": ["1", "0.5", "1e-3", "nan", "half", "4k", "None"],
    "count": ["1", "4k", "4K", "25.6k", "25.6K", "2M", "4x", "two", "k", "None", ""],
    "count or auto": ["1", "4k", "4K", "auto", "Auto", "-1", "1.5", "4x", "25.6K"],
    "json": ["{}", '{"a": {"b": 1}}', "[1]", "null", "{", "a", "None", ""],
    "json or text": ["{}", '{"a": "b"}', " { } ", "a", "{a}", "None", ""],
    "object": ["{}", "{", "1", "a", "None", ""],
    "lowered": ["auto", "Auto", "TRITON", "none of them"],
    "devices": ["0", "1,2", "GPU-a, 3", ""],
}
REFUSED = object()
OF_THE_PARSER = {"values", "unknown", "vllm_argv", "places"}  # no values of flags
RELEASE = versions.installed()[1].partition("+")[0]


@pytest.fixture(scope="module")
def server() -> argparse.ArgumentParser:
    """vLLM's, which raises ValueError where it would end the process."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made = make_arg_parser(FlexibleArgumentParser())

    def error(message: str) -> None:
        raise ValueError(message)

    made.error = error
    return made


@pytest.fixture(scope="module")
def flags() -> tuple[Flag, ...]:
    return table.shipped(RELEASE)


def test_the_table_is_that_of_vllms_parser(flags: tuple[Flag, ...]) -> None:
    from attnres_serve.compat.flags import reading

    assert {flag.name: flag for flag in reading.read()} == {flag.name: flag for flag in flags}
    assert all(flag.kind in kinds.KINDS for flag in flags)  # none is unknown


def test_defaults_are_vllms(flags: tuple[Flag, ...]) -> None:
    """Where an argument is not given, its value is the newest vLLM's."""
    newest = {flag.name: flag.default for flag in table.shipped(table.releases()[-1])}
    had = {one.name for one in dataclasses.fields(Arguments)} - OF_THE_PARSER
    assert had <= {*newest}
    plain = {name: getattr(Arguments(), name) for name in had}
    same = {name: newest[name] for name in had}
    assert plain == same | {"lora_modules": [], "model": None, "enable_lora": False}
    assert newest["model"] and newest["enable_lora"] is None  # which stand for none here


def spellings(flag: Flag) -> Iterator[Callable[[str], list[str]]]:
    """Every way to give a flag a word."""
    for name in flag.spellings:
        yield lambda word, name=name: [name, word]
        yield lambda word, name=name: [f"{name}={word}"]
        if name.startswith("--"):
            spelt = "--" + name[2:].replace("-", "_")
            yield lambda word, spelt=spelt: [spelt, word]
            yield lambda word, spelt=spelt: [f"{spelt}={word}"]


def value_of(read: Callable[[], Any]) -> Any:
    try:
        return plain(read())
    except (ValueError, argparse.ArgumentError):
        return REFUSED


def plain(value: Any) -> Any:
    """A value without the classes in which vLLM wraps some."""
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {one.name: plain(getattr(value, one.name)) for one in fields}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return repr(value) if value != value else value  # not a number


@pytest.mark.filterwarnings("ignore:--log-config-file is deprecated")
def test_every_flag_in_every_spelling(server, flags) -> None:
    """The value is vLLM's, and what vLLM takes is never refused."""
    refused = taken = 0
    for flag in flags:
        is_other = flag.action in (SWITCH, ADAPTERS) or spelling.CONFIG in flag.spellings
        if is_other or not flag.spellings:
            continue
        first, *others = spellings(flag)
        words = [*map(str, flag.choices or ()), *WORDS[str(flag.kind)]]
        every = [first(word) for word in words]
        every += [spell(word) for spell in others for word in (words[0], words[-3])]
        for message in every:
            theirs = value_of(
                lambda message=message, flag=flag: vars(server.parse_args(message))[flag.name]
            )
            ours = value_of(lambda message=message, flag=flag: of_server(message).values[flag.name])
            if flag.kind == "object" and ours is not REFUSED:
                continue  # vLLM makes a class of it, and refuses what that has no field for
            assert ours == theirs, message
            refused, taken = refused + (ours is REFUSED), taken + (ours is not REFUSED)
    assert refused > 300 and taken > 1500


def test_every_switch(server, flags) -> None:
    switches = [flag for flag in flags if flag.action == SWITCH]
    assert len(switches) > 80
    for name in (name for flag in switches for name in (*flag.spellings, *flag.off)):
        (flag,) = [flag for flag in switches if name in (*flag.spellings, *flag.off)]
        for spelt in {name, name[:2] + name[2:].replace("-", "_")}:
            theirs = vars(server.parse_args([spelt]))[flag.name]
            assert of_server([spelt]).values[flag.name] == theirs, spelt
            if spelt.startswith("--"):
                with pytest.raises(SettingError, match=rf"found {name} with a value, which takes"):
                    of_server([f"{spelt}=true"])


@pytest.mark.parametrize(
    "words",
    [
        ["-O3"],
        ["-O", "2"],
        ["-O=1"],
        ["--hf-overrides.rope_theta", "1e4", "--hf_overrides.a.b=x", "--hf-overrides.a.c", "4k"],
        ["--hf-overrides", '{"a": 1}', "--hf-overrides.b", "2"],
        ["--hf-overrides.list+", "a,b", "--hf-overrides.list+=c"],
        ["--speculative-config.num_speculative_tokens", "1", "-sc.method=ngram"],
        ["-sc", '{"method": "ngram"}', "--speculative_config", "None"],
        ["--served-model-name", "a", "b", "--port", "1"],
        ["--lora-modules", "a=b", '{"name": "c", "path": "d"}'],
        ["--max-model-len", "4k", "--max_model_len=1k"],
        ["--middleware", "a", "--middleware=b"],
        ["-tp=2", "-pp", "2", "-dp", "1", "-n", "2"],
        ["-qawq"],
        ["--hf-token"],
        ["--hf-token", "x"],
        ["--no-enforce-eager", "--enforce-eager"],
        ["--port=1", "--host", "-x"],
        ["--chat-template", "-with a space"],
        ["--compilation-config", '{"mode": 0}', "-cc.mode=3"],
        ["--gpu-memory-utilization", "-5e3"],
    ],
)
def test_whole_command_lines(words: list[str], server) -> None:
    usual = vars(server.parse_args([]))
    theirs = value_of(lambda: {**vars(server.parse_args(words))})
    if theirs is REFUSED:
        with pytest.raises(SettingError):
            of_server(words)
        return
    given = of_server(words).values
    for name, value in theirs.items():
        if name in given and name not in ("compilation_config", "optimization_level"):
            value = plain(value)
            ours = (
                [{**one, **kept} for one, kept in zip(value, given[name], strict=True)]
                if (name == "lora_modules")
                else given[name]
            )
            assert ours == value
        elif name not in given:
            assert value == usual[name], name


@pytest.mark.parametrize(
    "content",
    [
        {"port": 1, "max-model-len": "4k", "enforce_eager": True},
        {"enforce-eager": False, "headless": False},
        {"served-model-name": ["a", "b"], "lora-modules": []},
        {"hf-overrides": {"a": {"b": 1}}, "speculative-config": {"method": "ngram"}},
        {"revision": None, "seed": 3, "gpu-memory-utilization": 0.5},
        {"max_model_len": 64, "enforce_eager": False, "served-model-name": ["a", "b"]},
    ],
)
def test_a_file_of_flags(content: dict, server, tmp_path: Path) -> None:
    import yaml

    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    for more in ([], ["--port", "2"], ["--max-model-len=5", "--enforce-eager"]):
        words = ["--config", str(path), *more]
        theirs, usual = vars(server.parse_args([*words])), vars(server.parse_args([]))
        given = of_server([*words]).values
        assert {name: theirs[name] for name in given} == given
        assert {name for name in theirs if theirs[name] != usual[name]} <= {*given}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config=serve.yaml"], "expected --config FILE once, with a space"),
        (["--config"], "expected --config FILE once"),
        (["--config", "serve.json"], "ends with .yaml"),
        (["--config", "serve.yaml", "--config", "serve.yaml"], "once"),
        (["--config", "another.yaml"], "cannot be read"),
    ],
)
def test_a_file_of_flags_at_which_vllm_would_fail(words, message, tmp_path, monkeypatch) -> None:
    """``test_configuration`` has what may be wrong in it."""
    monkeypatch.chdir(tmp_path)
    Path("serve.yaml").write_text("port: 1")
    with pytest.raises(SettingError, match=message):
        of_server(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-model-lenn", "5"], "found --max-model-lenn, which is no flag; did you mean --max"),
        (["--max-model", "5"], "did you mean --max-model-len?"),
        (["--no-enforce-eagr"], "did you mean --no-enforce-eager?"),
        (["--hf-override.a", "1"], "found --hf-override, which is no flag; did you mean --hf-over"),
        (["-tpp", "2"], "did you mean -tp?"),
        (["--disable-log-requests"], "did you mean --no-enable-log-requests?"),
        (["--no-disable-log-requests"], "did you mean --enable-log-requests?"),
        (["--enable-log-stats"], "did you mean --no-disable-log-stats?"),
        (["--enable-log-request"], "did you mean --enable-log-requests?"),
        (["--ours-als"], "did you mean --ours-also?"),
        (["--max-model-len", "5", "--quite-another"], "--help=all"),
        (["--enforce-eager", "true"], "found 'true', which belongs to no flag; leave it out, or"),
        (["another/model"], "found 'another/model', which belongs to no flag"),
        (["--dtype", "float17"], "found --dtype float17; expected one of auto, bfloat16, float, "),
        (["--enforce-eager", "--kv_cache_dtype=fp9"], "found --kv-cache-dtype fp9; expected one"),
        (["--load-format=a", "--tokenizer-mode", "x", "--dtype=int8"], "found --dtype int8; "),
        (["--dtype", "--load-format=auto"], "found --dtype without a value; expected one of auto"),
        (["--port"], "found --port without a value; expected a whole number."),
        (["--port", "80x"], "found --port 80x; expected a whole number."),
        (["-tp", "two"], "found --tensor-parallel-size two; expected a whole number."),
        (["--max-model-len", "4x"], "found --max-model-len 4x; expected a whole number such as"),
        (["--kv-cache-memory-bytes=1.5G"], "found --kv-cache-memory-bytes 1.5G; expected a whole"),
        (["--lora-modules"], "found --lora-modules without a value; expected NAME=FOLDER"),
        (["-d", "2"], "ambiguous option: -d could match"),
        (["--ours_also", "5"], "found --ours-also with underscores in its name; write it with"),
        (["--port="], "found --port ''; expected a whole number."),
        (["--lora-modules", "{}"], "found '{}' after --lora-modules; expected NAME=FOLDER"),
    ],
)
def test_what_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        of_serve(None, words, (), None, {"--ours-also"})
    assert message in str(refused.value)


def test_an_engine_has_fewer_flags_than_a_server() -> None:
    assert of_engine(["-tp", "2"]).tensor_parallel_size == 2
    with pytest.raises(SettingError, match="found --port, which is no flag"):
        of_engine(["--port", "1"])


def test_none_is_no_value() -> None:
    words = ["--served-model-name", "None", "--kv-cache-memory-bytes", "None", "-sc", "None"]
    result = of_server(words)
    assert not result.has("kv_cache_memory_bytes", "speculative_config") and result.values
    assert result.served_model_name == []


def test_other_flags_may_stand_among_them() -> None:
    result = among(["--attnres-backend", "cpp", "--max_model_len=4k", "--disable-trace"])
    assert (result.max_model_len, result.dtype) == (4000, "auto")
    assert result.unknown == ("--attnres-backend", "cpp", "--disable-trace")


def test_a_platform_of_another_package_may_add_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "entry_points", lambda group: [group])
    table.of_installed.cache_clear()
    try:
        assert of_server(["--theirs", "5", "-tp", "2"]).tensor_parallel_size == 2
        with pytest.raises(SettingError, match="expected a whole number"):
            of_server(["--theirs", "-tp", "two"])
    finally:
        table.of_installed.cache_clear()


@pytest.fixture
def another_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A vLLM that the table does not know; the folder of what is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(versions, "installed", lambda: ("vllm", "0.32.0+mine"))
    table.of_installed.cache_clear()
    yield tmp_path
    table.of_installed.cache_clear()


def test_another_version_is_read_once(another_vllm, monkeypatch) -> None:
    """By importing it, in a process of its own."""
    flags, is_whole = table.of_installed()
    assert is_whole and {*flags} == {*table.shipped(RELEASE)}
    (kept,) = another_vllm.rglob("flags-0.32.0+mine-*.json")
    assert len(json.loads(kept.read_text())) == len(flags)
    table.of_installed.cache_clear()
    monkeypatch.setattr(table.subprocess, "run", None)  # it would be called
    assert table.of_installed() == (flags, True)


def test_a_vllm_that_cannot_be_imported(another_vllm, monkeypatch) -> None:
    """What is known of the newest tested one is read, and all others are left to it."""
    monkeypatch.setattr(table, "READING", "attnres_serve.nowhere")
    result = of_server(["--another", "-tp", "2"])
    assert (result.tensor_parallel_size, result.unknown) == (2, ("--another",))
    assert not [*another_vllm.rglob("flags-*.json")]


def test_kinds_and_spellings_without_vllm() -> None:
    assert kinds.count("25.6k") == 25_600 and kinds.count_or_auto("auto") == -1
    assert kinds.expand('{"a": 80m, "b": "80m"}') == '{"a": 80000000, "b": "80m"}'
    assert spelling.usual(["--a_b.c_d=e_f", "--a_b.e", "1"]) == ["--a-b", '{"c_d": "e_f", "e": 1}']
    with pytest.raises(SettingError):
        parser.read(["--a"], [])
    assert {"max_model_len", "values"} <= arguments.NAMES


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("serve", ["--port", "abc"]),
        ("serve", ["-tp", "two"]),
        ("serve", ["--max-model-len", "4x"]),
        ("bench", ["--max-model-len", "4x"]),
        ("inspect", ["--prompt", "x", "--max-num-seqz", "5"]),
    ],
)
def test_a_mistake_costs_no_start(which: str, words: list[str]) -> None:
    status, message, seconds = command(which, DEMO, *words)
    assert status == 2
    assert message.startswith("attnres-serve: found --") and message.count("\n") == 1
    assert seconds < of_a_start()
