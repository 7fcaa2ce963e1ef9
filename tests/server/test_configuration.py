"""Flags on the command line, in a file and in variables: one parser, one order of precedence."""

import argparse
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from cost import command, of_a_start
from demo_servers import every_flag
from serving import DEMO, ROOT

from attnres_serve import cli
from attnres_serve.compat import openai_server
from attnres_serve.compat.arguments import Arguments, of_serve
from attnres_serve.compat.flags import reading, variables
from attnres_serve.errors import SettingError
from attnres_serve.server import launcher
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.start import events

pytest.importorskip("vllm")

OURS = reading.ours(launcher.add_arguments)
NAMES = {flag.name for flag in OURS}
# Values of every flag of ours that are not its default.
VALUES: dict[str, Any] = {
    "api_key_file": "keys",
    "public_metrics": True,
    "enable_weight_updates": True,
    "enable_attnres_edits": True,
    "max_body_bytes": 7,
    "max_concurrent_requests": 8,
    "max_sequences": 9,
    "max_trace_tokens": 10,
    "max_trace_weights": 11,
    "max_trace_bytes": 13,
    "drain_delay": 12,
    "attnres_algorithm": "two_phase",
    "attnres_backend": "torch",
    "attnres_native": "off",
    "attnres_shard_sites": "on",
    "attnres_shard_tokens": 64,
    "attnres_aux_stream": "mixed",
    "attnres_edit": ["mask sources=partial"],
    "disable_trace": True,
    "verbose": True,
}
# Of vLLM's: as a file has them, and what vLLM's parser makes of it, where that is another value.
VLLMS: dict[str, tuple[Any, ...]] = {
    "port": (0,),
    "host": ("localhost",),
    "served-model-name": (["a", "1.10"],),
    "max_model_len": ("1k", 1000),
    "dtype": ("float32",),
    "enforce_eager": (True,),
    "enable_prefix_caching": (False,),
    "no-async-scheduling": (True, False),
    "gpu-memory-utilization": (0.5,),
    "max-num-seqs": (3,),
    "seed": (7,),
    "allowed-origins": (["https://a"],),
    "override-generation-config": ({"temperature": 0.5},),
    "hf-overrides.a.b": (1, {"a": {"b": 1}, "c": "x"}),
    "hf_overrides.c": ("x", {"a": {"b": 1}, "c": "x"}),
    "uvicorn-log-level": ("error",),
    "h11_max_header_count": (9,),
    "revision": (None,),
    "generation-config": ("vllm",),
    "trust-remote-code": (False,),
    "lora-modules": ([{"name": "c", "path": "d"}], None),
    "enable-lora": (True,),
    "shutdown-timeout": (3,),
    "middleware": (
        ["attnres_serve.server.request_ids.RequestIds"],
        ["attnres_serve.server.request_ids.RequestIds"] * 2,
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a file of keys."""
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text("a-key")
    return tmp_path


def read(*words: str, file: str | None = None, **environment: str) -> Arguments:
    """The arguments of ``serve``."""
    if file is not None:
        Path("serve.yaml").write_text(file)
        words = (*words, "--config", "serve.yaml")
    return of_serve(None, words, OURS, environment)


def refused(*words: str, file: str | None = None, **environment: str) -> str:
    with pytest.raises(SettingError) as error:
        read(*words, file=file, **environment)
    return str(error.value)


def test_a_file_starts_the_server(folder, served: list[argparse.Namespace], monkeypatch) -> None:
    """With every flag of ours and more than twenty of vLLM's."""
    assert {*VALUES} == NAMES and len(VLLMS) > 20
    monkeypatch.setattr(openai_server, "weight_transfer", lambda _: {})
    monkeypatch.setattr(launcher.check_checkpoint.__globals__["modules"], "check", lambda *_: None)
    content = {name: value for name, (value, *_) in VLLMS.items()} | VALUES
    Path("serve.yaml").write_text(yaml.safe_dump({"model": str(DEMO)} | content))
    assert cli.main(["serve", "--config", "serve.yaml"]) == 0
    (args,) = served
    assert args.model == str(DEMO) and openai_server.api_keys(args) == ["a-key"]
    assert openai_server.policy_of(args) == Policy(True, 7, 8, 9, 10, 11, 13, 12, True)
    found = {key: value for key, value in args.additional_config.items() if value != "off"}
    assert found.pop("attnres_edits") == [{"sources": ["partial"], "mask": True}]
    assert found.pop("attnres_edits_change") == "on"
    assert found == {name: VALUES[name] for name in found} and len(found) == 5
    assert args.additional_config["attnres_trace"] == "off" == VALUES["attnres_native"]
    for name, (value, *others) in VLLMS.items():
        dest = name.partition(".")[0].replace("-", "_").removeprefix("no_")
        if name != "lora-modules":
            assert getattr(args, dest) == (others[0] if others else value), name
    assert [(one.name, one.path) for one in args.lora_modules] == [("c", "d")]


def test_the_file_of_the_page_is_one(folder) -> None:
    page = (ROOT / "docs" / "use" / "operations" / "configuration.md").read_text()
    found = read(file=re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)[0])
    assert (found.model, found.port) == ("path/to/checkpoint", 9000)
    assert found.values["max_sequences"] == 64 and found.values["public_metrics"] is True
    assert found.values["hf_overrides"] == {"rope_theta": 10000}


def test_variables_start_the_server(folder, served, monkeypatch) -> None:
    """Those of all flags of ours, by one rule for their names."""
    monkeypatch.setattr(openai_server, "weight_transfer", lambda _: {})
    for name, value in VALUES.items():
        variable = "ATTNRES_" + name.removeprefix("attnres_").upper()
        value = value[0] if isinstance(value, list) else value
        monkeypatch.setenv(variable, "1" if value is True else str(value))
    assert cli.main(["serve", str(DEMO), "--port", "0"]) == 0
    (args,) = served
    assert openai_server.api_keys(args) == ["a-key"]
    assert openai_server.policy_of(args) == Policy(True, 7, 8, 9, 10, 11, 13, 12, True)
    assert len(args.additional_config) == 9


def test_the_server_of_other_tests_has_every_flag(tmp_path) -> None:
    """So that one with an engine is started by such a file: ``keyed_server``."""
    names = {name.replace("-", "_") for name in every_flag(tmp_path)}
    assert names > NAMES and len(names - NAMES) >= 20


FILE, VARIABLE = "max-sequences: 2\nverbose: false\n", {"ATTNRES_MAX_SEQUENCES": "3"}


@pytest.mark.parametrize(
    ("words", "file", "environment", "wanted"),
    [
        ([], None, {}, None),
        ([], None, VARIABLE, 3),
        ([], FILE, VARIABLE, 2),
        (["--max-sequences", "4"], FILE, VARIABLE, 4),
        (["--max_sequences=4"], None, VARIABLE, 4),
        (["--max-sequences", "4"], FILE, {}, 4),
    ],
)
def test_which_place_counts(folder, words, file, environment, wanted) -> None:
    found = read(*words, file=file, **environment)
    assert found.values.get("max_sequences") == wanted
    assert found.vllm_argv == ()


def test_a_switch_is_turned_off_again(folder) -> None:
    switches = [flag for flag in OURS if flag.action == "switch"]
    assert len(switches) == 5
    for flag in switches:
        on = {variables.name_of(flag.long): "true"}
        assert read(**on).values[flag.name] is True
        assert read(file=f"{flag.name}: false", **on).values[flag.name] is False
        assert read(flag.off[0], file=f"{flag.name}: true", **on).values[flag.name] is False
        assert read(flag.long, file=f"no-{flag.name}: true").values[flag.name] is True


@pytest.mark.parametrize(
    ("words", "file", "wanted"),
    [
        (["--port", "1"], "port: 2\nseed: 3\n", {"port": 1, "seed": 3}),
        (["--no-enforce-eager"], "enforce_eager: true", {"enforce_eager": False}),
        (["-tp", "2"], "tensor_parallel_size: 3", {"tensor_parallel_size": 2}),
        # As a whole, where vLLM would let the file's keys replace the command line's.
        (["--hf-overrides", '{"b": 2}'], "hf-overrides.a: 1", {"hf_overrides": {"b": 2}}),
        (["--hf-overrides.b", "2"], "hf-overrides: {a: 1}", {"hf_overrides": {"b": 2}}),
        (["--middleware", "b"], "middleware: [a]", {"middleware": ["a", "b"]}),
        (["--model", "m"], "model: n", {"model": "m"}),
        ([], "model: n", {"model": "n"}),
    ],
)
def test_the_command_line_replaces_a_flag_of_a_file(folder, words, file, wanted) -> None:
    found = read(*words, file=file)
    assert {name: found.values[name] for name in wanted} == wanted
    assert found.model == wanted.get("model")
    assert read(*found.vllm_argv).values == {k: v for k, v in found.values.items() if k != "model"}


@pytest.mark.parametrize(
    "words",
    [
        ("--served-model-name", "my_model", "a_b=c_d"),
        ("--speculative-config", '{"method": "draft_model", "num_speculative_tokens": 1}'),
        ("--tokenizer", "a_folder/with_a.name"),
        ("--dtype=bfloat16", "--tokenizer=a_b"),
    ],
)
def test_values_come_to_vllm_as_they_are(folder, words) -> None:
    """With underscores; in the names of flags these are dashes."""
    first, *values = words
    name, equals, value = first.partition("=")
    spelt = "--" + name.removeprefix("--").replace("-", "_")
    found = read("--max_sequences", "4", spelt + equals + value, *values)
    assert found.vllm_argv == words


def test_a_checkpoint_in_its_place_replaces_that_of_a_file(folder, served) -> None:
    Path("serve.yaml").write_text("model: nowhere\nport: 0\n")
    assert cli.main(["serve", str(DEMO), "--config", "serve.yaml"]) == 0
    assert served[0].model == str(DEMO) and served[0].served_model_name[0] == DEMO.name


@pytest.mark.parametrize("words", [["--model", "n"], ["--model=n"]])
def test_two_checkpoints_on_a_command_line(words) -> None:
    with pytest.raises(SettingError, match="found --model beside the checkpoint 'm'; give the"):
        of_serve("m", words, OURS, {})


MISTAKES = [
    ("port: 1\nmax-model-lenn: 64\n", 2, "found --max-model-lenn, .*did you mean --max-model-len?"),
    ("# keys\n\napi_key_fil: keys\n", 3, "found --api-key-fil, .*did you mean --api-key-file?"),
    (
        "attnres_backnd: cpp\n",
        1,
        "found --attnres-backnd, which is no flag; did you mean --attnres-backend?",
    ),
    ("enforce-eagr: false\n", 1, "found --enforce-eagr, .*did you mean --enforce-eager?"),
    ("tp: 2\n", 1, "found --tp, which is no flag"),
    ("max-model-len: 4x\n", 1, "found --max-model-len 4x; expected a whole number such as"),
    ("port: 80x\n", 1, "found --port 80x; expected a whole number"),
    ("port: true\n", 1, "found --port true; expected a whole number"),
    ("port: [1, 2]\n", 1, "found --port with 2 values; expected one"),
    ("port: {a: 1}\n", 1, "found --port with more values inside; expected a whole number"),
    ("port:\n", 1, "found --port without a value; expected a whole number"),
    ("seed: 1\nport: 1\nport: 2\n", 3, "found --port again, after line 2; give it once"),
    ("max-model-len: 1\nmax_model_len: 2\n", 2, "found --max-model-len again, after line 1"),
    ("max-sequences: 0\n", 1, "found --max-sequences 0; expected a whole number of at least 1"),
    ("drain-delay: -1\n", 1, "found --drain-delay -1; expected a whole number of at least 0"),
    ("max-body-bytes: 1.5\n", 1, "found --max-body-bytes 1.5; expected a whole number"),
    ("attnres-native: true\n", 1, "found --attnres-native true; expected one of on, off, auto"),
    ("headless: 3\n", 1, "found --headless 3; expected true or false"),
    ("verbose: 'true'\n", 1, "found --verbose true; expected true or false"),
    ("disable-trace: [true]\n", 1, "found --disable-trace; expected true or false"),
    ("verbose:\n", 1, "found --verbose; expected true or false"),
    ("tokenizer: false\n", 1, "found --tokenizer false; expected a value"),
    ("compilation-config: [1]\n", 1, r"found --compilation-config \[1\]; expected a JSON object"),
    ("lora-modules: [{name: a}]\n", 1, ".*expected NAME=FOLDER, or JSON"),
    ("config: other.yaml\n", 1, "found --config in a file of flags"),
]


@pytest.mark.parametrize(("file", "line", "said"), MISTAKES, ids=str)
def test_a_mistake_in_a_file(folder, file, line, said) -> None:
    """Is told with its line, although the command line replaces the flag."""
    assert re.match(rf"serve\.yaml, line {line}: {said}", refused(file=file))
    assert re.match(rf"serve\.yaml, line {line}: ", refused("--port", "1", file=file))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"ATTNRES_API_KEYFILE": "x"},
            "ATTNRES_API_KEYFILE is set, .*did you mean ATTNRES_API_KEY",
        ),
        ({"ATTNRES_KEY_FILE": "x"}, "did you mean ATTNRES_API_KEY_FILE?"),
        ({"ATTNRES_SERVER_API_KEY_FILE": "x"}, "did you mean ATTNRES_API_KEY_FILE?"),
        ({"ATTNRES_ATTNRES_BACKEND": "cpp"}, "did you mean ATTNRES_BACKEND?"),
        ({"ATTNRES_PORT": "9000"}, "ATTNRES_PORT is set, and --port is a flag of vLLM's"),
        ({"ATTNRES_API_KEY": "x"}, "and --api-key is a flag of vLLM's, which has no variable"),
        ({"ATTNRES_MODEL": "m"}, "and --model is a flag of vLLM's, which has no variable"),
        ({"ATTNRES_X": "1"}, "ATTNRES_X is set, which is no variable of `serve`; unset it, or"),
        (
            {"ATTNRES_MAX_SEQUENCES": "x"},
            "ATTNRES_MAX_SEQUENCES: found --max-sequences x; expected",
        ),
        ({"ATTNRES_MAX_BODY_BYTES": "0"}, "ATTNRES_MAX_BODY_BYTES: found --max-body-bytes 0; exp"),
        ({"ATTNRES_BACKEND": "gpu"}, "ATTNRES_BACKEND: found --attnres-backend gpu; expected one"),
        ({"ATTNRES_VERBOSE": "on"}, "ATTNRES_VERBOSE: found on; expected 1 or 0"),
        (
            {"ATTNRES_API_KEY_FILE": ""},
            "ATTNRES_API_KEY_FILE: it is set and empty; give it a value",
        ),
        ({"ATTNRES_DISABLE_TRACE": " "}, "ATTNRES_DISABLE_TRACE: it is set and empty"),
    ],
)
def test_a_mistake_in_a_variable(folder, environment, said) -> None:
    assert re.search(said, refused(**environment))


def test_what_is_no_variable_of_ours(folder) -> None:
    """Those of processes among themselves, of Kubernetes for Services, and everybody else's."""
    services = {
        "ATTNRES_SERVE_SERVICE_HOST": "10.0.0.1",
        "ATTNRES_SERVE_SERVICE_PORT_HTTP": "8000",
        "ATTNRES_PORT": "tcp://10.0.0.1:8000",
        "ATTNRES_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert read(**services, **{events.VARIABLE: "pipe", "MY_ATTNRES_X": "1"}).values == {}


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("a: [", r"serve\.yaml cannot be read \(.*line 1"),
        ("port: 1\n\tseed: 2\n", r"serve\.yaml cannot be read \(.*line 2"),
        ("a: 1\n---\nb: 2\n", "cannot be read"),
        ("when: !!int x", "cannot be read"),
        ("x: !!python/name:os.system", "cannot be read"),
        ("", "holds no flags; expected lines like `port: 8000`"),
        ("[port]", "holds no flags"),
        ("port", "holds no flags"),
    ],
)
def test_a_file_that_holds_no_flags(folder, file, said) -> None:
    assert re.search(said, refused(file=file))


@pytest.mark.parametrize(
    ("file", "wanted"),
    [
        ("revision: 0123", {"revision": "0123"}),  # for YAML a number to the base of 8
        ("served-model-name: [1.10, no]", {"served_model_name": ["1.10", "no"]}),
        ("attnres-shard-sites: on", {"attnres_shard_sites": "on"}),  # for YAML the truth
        ("port: 0x10", {"port": 16}),
        ("x: &x {dtype: half}\n<<: *x", None),
        ("base: &x 5\n", None),
        ("chat-template: '-x --y'", {"chat_template": "-x --y"}),
        ("api-key: [a, b]", {"api_key": ["a", "b"]}),
        ("hf-overrides: {a: 2024-01-01}", {"hf_overrides": {"a": "2024-01-01"}}),
        ("hf-overrides: {a: 2024-13-45}", {"hf_overrides": {"a": "2024-13-45"}}),
        ("hf-overrides.tie: true", {"hf_overrides": {"tie": True}}),
        ("lora-modules: a=b", {"lora_modules": [{"name": "a", "path": "b"}]}),
        ("hf-token:", {"hf_token": True}),
        ("kv-cache-memory-bytes: null", {"kv_cache_memory_bytes": None}),
        ("allowed-origins: []", {"allowed_origins": []}),
    ],
)
def test_values_as_they_are_written(folder, file, wanted) -> None:
    if wanted is None:  # a name that is no flag
        assert "which is no flag" in refused(file=file)
    else:
        assert read(file=file).values == wanted


@pytest.mark.parametrize(
    ("lines", "variable", "place", "said"),
    [
        (["port: 70000"], {}, "serve.yaml, line 2", "70000 is an invalid port"),
        (["host: 192.0.2.1"], {}, "serve.yaml, line 2", "cannot be bound"),
        (["uds: nowhere/s"], {}, "serve.yaml, line 2", "no socket can be made at nowhere/s"),
        (["api-key-file: k"], {}, "serve.yaml, line 2", "k cannot be read for --api-key-file"),
        (["api-key-file: bad"], {}, "serve.yaml, line 2", "line 1 of bad is no API key"),
        ([], {"API_KEY_FILE": "none"}, "ATTNRES_API_KEY_FILE", "none has no API key"),
        ([], {"API_KEY_FILE": "k"}, "ATTNRES_API_KEY_FILE", "k cannot be read for"),
        (["grpc: true"], {}, "serve.yaml, line 2", "found --grpc"),
        (["", "api-key: a"], {"API_KEY_FILE": "keys"}, "serve.yaml, line 3 and ATTNRES_API", "bes"),
        (["attnres-shard-tokens: 1"], {}, "serve.yaml, line 2", "attnres_shard_tokens is 1"),
        ([], {"SHARD_TOKENS": "1"}, "ATTNRES_SHARD_TOKENS", "attnres_shard_tokens is 1"),
        (["max-model-len: 4096"], {}, "serve.yaml, line 2", "a context of 1024 tokens"),
        (["enable-weight-updates: true"], {}, "serve.yaml, line 2", "there is no API key"),
        ([], {"ENABLE_WEIGHT_UPDATES": "1"}, "ATTNRES_ENABLE_WEIGHT", "there is no API key"),
        (["model: nowhere"], {}, "serve.yaml, line 2: nowhere", "nowhere"),
        (["model: keys"], {}, "serve.yaml, line 2: keys", "keys"),
    ],
)
def test_a_refusal_names_the_place(
    folder, capfd, monkeypatch, lines, variable, place, said
) -> None:
    """Of what cannot be told from the words alone."""
    monkeypatch.setattr(openai_server, "run_server", None)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    Path("bad").write_text("two words")
    Path("none").write_text("\n")
    Path("serve.yaml").write_text("\n".join(["dtype: float32", *lines]))
    for name, value in variable.items():
        monkeypatch.setenv(f"ATTNRES_{name}", value)
    named = [] if any(line.startswith("model:") for line in lines) else [str(DEMO)]
    assert cli.main(["serve", *named, "--config", "serve.yaml"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"attnres-serve: {place}") and said in line


def test_what_stands_on_the_command_line_has_no_place(folder, capfd, monkeypatch) -> None:
    monkeypatch.setattr(openai_server, "run_server", None)
    Path("serve.yaml").write_text("port: 0\napi-key-file: keys\n")
    for words in (["--port", "70000"], ["--api-key-file", "k"]):
        assert cli.main(["serve", str(DEMO), "--config", "serve.yaml", *words]) == 2
        assert "serve.yaml" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "line", ["prt: 9", "port: 80x", "port: PORT", "api-key-file: nowhere", "model: /no/where"]
)
def test_a_mistake_in_a_file_costs_no_start(tmp_path, line: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        path = tmp_path / "serve.yaml"
        path.write_text(f"dtype: half\n{line.replace('PORT', str(taken.getsockname()[1]))}\n")
        place = [] if line.startswith("model") else [str(DEMO)]
        status, said, seconds = command("serve", *place, "--config", path)
    assert status == 2
    assert said.startswith(f"attnres-serve: {path}, line 2: ") and said.count("\n") == 1
    assert seconds < of_a_start()
