"""Flags, files and variables of a start, and what ends it."""

import gc
import os
import pickle
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from serving import GOLDENS

pytest.importorskip("vllm")

from bounded_app import KEY

from attnres_serve import cli
from attnres_serve.compat import openai_server
from attnres_serve.compat.arguments import of_server
from attnres_serve.server import launcher
from attnres_serve.server.bounds.policy import Policy
from attnres_serve.start import events

GOLDEN = str(GOLDENS / "fla_transformer_block")


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ({"host": "127.0.0.1"}, "loopback"),
        ({"host": "::1"}, "loopback"),
        ({"host": "localhost"}, "loopback"),
        ({"host": "127.0.0.1", "uds": "/run/x"}, "file"),
        ({"host": None}, "network"),
        ({"host": "0.0.0.0"}, "network"),
        ({"host": "a.example"}, "network"),
        ({}, "network"),
    ],
)
def test_what_reaches_the_server(args, place):
    assert openai_server.listens_on(SimpleNamespace(**args)) == place


def test_garbage_is_collected_in_a_server(served, monkeypatch):
    """Which its imports do without."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    command = staticmethod(lambda _: served.append(gc.isenabled()))
    monkeypatch.setattr(ServeSubcommand, "cmd", command)
    gc.disable()
    try:
        assert cli.main(["serve", GOLDEN, "--port", "0"]) == 0
    finally:
        gc.enable()
    assert served == [True]


def test_flags_reach_the_server(served, tmp_path, capfd):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\nanother\n")
    bounds = ["--max-body-bytes", "7", "--max-concurrent-requests", "8", "--max-sequences", "9"]
    bounds += ["--max-trace-tokens", "10", "--max-trace-weights", "11", "--drain-delay", "12"]
    bounds += ["--max-trace-bytes", "13"]
    flags = ["--port", "0", "--api-key-file", str(keys), "--public-metrics", *bounds]
    assert cli.main(["serve", GOLDEN, *flags]) == 0
    (args,) = served
    assert openai_server.api_keys(args) == [KEY, "another"]
    assert openai_server.policy_of(args) == Policy(True, 7, 8, 9, 10, 11, 13, 12)
    assert args.allowed_origins == []
    assert not args.trust_remote_code
    # To processes of their own they travel pickled; vLLM 0.28 logs the arguments as they are.
    copied = pickle.loads(pickle.dumps(args))
    assert openai_server.policy_of(copied) == Policy(True, 7, 8, 9, 10, 11, 13, 12)
    assert openai_server.api_keys(copied) == [KEY, "another"]
    assert KEY not in repr(copied) + str(vars(copied)) + capfd.readouterr().err


def test_without_flags(served, capfd):
    assert cli.main(["serve", GOLDEN, "--port", "0"]) == 0
    assert cli.main(["serve", GOLDEN, "--port", "0", "--allowed-origins", '["https://a"]']) == 0
    assert [args.allowed_origins for args in served] == [[], ["https://a"]]
    assert openai_server.api_keys(served[0]) == []
    assert openai_server.policy_of(served[0]) == Policy()
    assert served[0].h11_max_incomplete_event_size == 2**16
    assert "api-key" not in capfd.readouterr().err


@pytest.mark.parametrize("flag", [["--api-key", KEY], [f"--api-key={KEY}"], ["--api_key", KEY]])
def test_a_key_on_the_command_line_is_taken_with_a_warning(served, capfd, flag, monkeypatch):
    told: list[dict] = []
    monkeypatch.setattr(events, "tell", lambda _, **facts: told.append(facts))
    assert cli.main(["serve", GOLDEN, "--port", "0", *flag]) == 0
    assert openai_server.api_keys(served[0]) == [KEY]
    assert any("--api-key-file" in facts.get("text", "") for facts in told)
    assert KEY not in capfd.readouterr().err + str(told)


@pytest.mark.parametrize(
    ("flags", "variables", "said"),
    [
        (["--api-key", KEY], {}, "--api-key beside --api-key-file"),
        (["--grpc"], {}, "--grpc"),
        (["--api-key", ""], {}, "an empty --api-key"),
        ([], {"VLLM_SERVER_DEV_MODE": "1"}, "VLLM_SERVER_DEV_MODE"),
        ([], {"VLLM_USE_RUST_FRONTEND": "1"}, "VLLM_USE_RUST_FRONTEND"),
        ([], {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}, "VLLM_ENABLE_RESPONSES_API_STORE"),
    ],
    ids=str,
)
def test_what_would_open_the_server_is_refused(
    served, tmp_path, capfd, monkeypatch, flags, variables, said
):
    keys = tmp_path / "keys"
    keys.write_text("another")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    words = ["serve", GOLDEN, "--port", "0", "--api-key-file", str(keys), *flags]
    assert cli.main(words) == 2 and not served
    err = capfd.readouterr().err.splitlines()
    assert said in err[-1] and err[-1].startswith("attnres-serve: ")


@pytest.mark.parametrize("servers", ["1", "2"])
def test_a_port_that_the_system_chooses_is_for_one_server(served, capfd, servers):
    """Several cannot report it, so their start would not end."""
    status = cli.main(["serve", GOLDEN, "--port", "0", "--api-server-count", servers])
    assert (status == 2, bool(served)) == ((False, True) if servers == "1" else (True, False))
    assert ("--port 0" in capfd.readouterr().err) is not bool(served)


def test_an_empty_key_ends_the_start_where_it_would_be_used(served, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", " ")
    assert cli.main(["serve", GOLDEN, "--port", "0"]) == 2 and not served
    assert "VLLM_API_KEY is set and empty" in capfd.readouterr().err
    (tmp_path / "keys").write_text(KEY)
    words = ["serve", GOLDEN, "--port", "0", "--api-key-file", str(tmp_path / "keys")]
    assert cli.main(words) == 0 and served


@pytest.mark.parametrize("points", [[], [EntryPoint("attnres", "no.such.module:x", "group")]])
def test_a_plugin_that_does_not_load_ends_the_start(served, capfd, monkeypatch, points):
    """vLLM would log that, and serve without keys and bounds."""
    monkeypatch.setattr(launcher, "entry_points", lambda **_: points)
    assert cli.main(["serve", GOLDEN, "--port", "0"]) == 2 and not served
    (said,) = capfd.readouterr().err.splitlines()
    assert "keys and bounds, cannot be loaded" in said


@pytest.mark.parametrize("flag", ["--enable-weight-updates", "--enable-attnres-edits"])
def test_what_needs_a_key_ends_the_start_without(served, tmp_path, capfd, monkeypatch, flag):
    """Any page that a browser shows could pause the server, or change what it computes."""
    words = ["serve", GOLDEN, "--port", "0", flag]
    assert cli.main(words) == 2 and not served
    assert "there is no API key" in capfd.readouterr().err.splitlines()[-1]
    keys = tmp_path / "keys"
    keys.write_text("one")
    monkeypatch.setattr(openai_server, "weight_transfer", lambda words: {})
    for more in (["--api-key", "one"], ["--api-key-file", str(keys)], []):
        monkeypatch.setenv("VLLM_API_KEY", "" if more else "one")
        if more:
            monkeypatch.delenv("VLLM_API_KEY")
        assert cli.main([*words, *more]) == 0
    assert len(served) == 3


@pytest.mark.parametrize("is_given", [False, True])
def test_what_a_file_of_flags_says_is_told(tmp_path, monkeypatch, log, is_given):
    value = str(is_given).lower()
    config = tmp_path / "flags.yaml"
    config.write_text(f"enable-log-requests: {value}\nheadless: {value}\nport: 0\n")
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_PLUGINS", "attnres")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "")
    monkeypatch.delenv("VLLM_LOGGING_LEVEL")
    monkeypatch.setattr(launcher, "check_checkpoint", lambda name, words: (name, None, "bfloat16"))
    monkeypatch.setattr(launcher.openai_server, "run_server", lambda *_: None)
    with log.heard():
        launcher.serve(of_server(["--config", str(config)]))
    (event,) = [event for event in log.events() if event["event"] == "checked"]
    assert (event["log"], event["headless"], event["socket"]) == (is_given, is_given, None)
    assert os.environ.get("VLLM_LOGGING_LEVEL") == (None if is_given else "WARNING")


@pytest.mark.parametrize(
    ("checkpoint", "model", "words", "names"),
    [
        (None, "/src/demo/checkpoint", [], ["demo", "/src/demo/checkpoint"]),
        ("/m/mine", "/m/mine", [], ["mine", "/m/mine"]),
        ("/m/mine/", "/m/mine", ["--port=1"], ["mine", "/m/mine/", "/m/mine"]),
        ("/", "/", [], ["/"]),
        ("org/model", "org/model", [], ["org/model"]),
        ("/m/mine", "/m/mine", ["--lora-modules", "mine=/a", "b=/b"], ["/m/mine"]),
        ("/m/mine", "/m/mine", ["--lora-modules=mine=/a"], ["/m/mine"]),
        ("/m/mine", "/m/mine", ["--lora-modules", '{"name": "mine", "path": "/a"}'], ["/m/mine"]),
    ],
)
def test_a_model_has_the_name_of_its_folder(checkpoint, model, words, names):
    """And that of its path; an adapter keeps the name that it was given."""
    assert launcher.names(checkpoint, model, of_server(words)) == names
