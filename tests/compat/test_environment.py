"""The environment of an engine: what vLLM would stumble over is told, or corrected, at once."""

import os
import re
import tempfile

import pytest
from commands import run
from serving import DEMO, OURS, ROOT, environment

from attnres_serve import cli
from attnres_serve.compat import environment as variables
from attnres_serve.compat import source
from attnres_serve.errors import SettingError

pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VLLM_CPU_KVCACHE_SPACE", "1GiB", "and expected is a whole number of GiB; correct or"),
        ("VLLM_CPU_KVCACHE_SPACE", "0.25", "and expected is a whole number of GiB; correct or"),
        ("VLLM_LOG_STATS_INTERVAL", "often", "and expected is a number; correct or unset it."),
        ("VLLM_USE_TRITON_AWQ", "yes", "and expected is a whole number; correct or unset it."),
        ("VLLM_PORT", "tcp://10.0.0.1:80", "which Kubernetes sets where a Service is called vllm"),
        ("VLLM_PORT", "http", "which vLLM cannot read (VLLM_PORT 'http' must be a valid integer)"),
        ("VLLM_PORT", "99999", "and expected is a port from 0 to 65535; correct or unset it."),
        ("VLLM_DP_MASTER_PORT", "-1", "and expected is a port from 0 to 65535; correct or unset"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "65536", "and expected is a port from 0 to 65535; correct"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "join", "which vLLM cannot read (Invalid value 'join' "),
    ],
)
@pytest.mark.parametrize("command", ["serve", "verify", "bench", "inspect"])
def test_a_value_that_vllm_cannot_read(name, value, message, command, monkeypatch, capfd) -> None:
    """It would say so after seconds, without the variable's name, or after the weights."""
    monkeypatch.setenv(name, value)
    assert cli.main([command, str(DEMO)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"attnres-serve: {name} is {value!r}, {message}")


def test_values_that_vllm_reads_are_left_alone(monkeypatch) -> None:
    for name, value in (
        ("VLLM_CPU_KVCACHE_SPACE", "2"),
        ("VLLM_LOG_STATS_INTERVAL", "0.5"),
        ("VLLM_PORT", "9000"),
        ("VLLM_DP_MASTER_PORT", "65535"),
        ("VLLM_LOGGING_PREFIX", ""),
        ("VLLM_NOT_ONE_OF_THEM", "tcp://10.0.0.1:80"),
    ):
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    variables.make_usable()
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["VLLM_CPU_KVCACHE_SPACE", "VLLM_PORT", "VLLM_LOG_STATS_INTERVAL"])
def test_a_blank_value_is_none(name, monkeypatch) -> None:
    """As a compose file leaves it."""
    monkeypatch.setenv(name, " ")
    variables.make_usable()
    assert name not in os.environ


def test_another_vllm_is_not_judged(monkeypatch) -> None:
    """One whose variables are read by other means, or none at all."""

    def fail(path: str) -> None:
        raise ImportError(path)

    monkeypatch.setenv("VLLM_PORT", "x")
    monkeypatch.setattr(source, "module", fail)
    variables.make_usable()
    monkeypatch.setattr(source, "module", lambda path: object())
    variables.make_usable()


@pytest.mark.parametrize("length", [70, 71, 200])
def test_sockets_have_short_paths(length, monkeypatch, tmp_path) -> None:
    folder = "/" + "x" * (length - 1)
    monkeypatch.delenv(variables.SOCKETS, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", folder)
    monkeypatch.setattr(variables, "SHORT", ("/does/not/exist", str(tmp_path)))
    variables.make_usable()
    assert os.environ.get(variables.SOCKETS) == (None if length == 70 else str(tmp_path))


@pytest.mark.parametrize("given", ["ours", "theirs", "in bytes"])
def test_a_folder_that_is_too_long_is_told(given, monkeypatch) -> None:
    folder = "/" + ("ä" * 40 if given == "in bytes" else "x" * 99)
    if given == "ours":
        monkeypatch.delenv(variables.SOCKETS, raising=False)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setattr(variables, "SHORT", ())
    else:
        monkeypatch.setenv(variables.SOCKETS, folder)
    what = r"the folder .* \(TMPDIR\)" if given == "ours" else variables.SOCKETS
    with pytest.raises(SettingError, match=rf"^{what} is /.*need at most 70.* VLLM_RPC_BASE_PATH"):
        variables.make_usable()


@pytest.mark.parametrize("name", ["a#b", "a?b", "#", "a b#c?d"])
def test_a_folder_that_is_no_path_of_a_url_is_told(name, monkeypatch, tmp_path) -> None:
    """Workers that share a file there would meet at another, which a next start finds again."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    with pytest.raises(SettingError, match=r"\(TMPDIR\) is .* a part of a URL; let TMPDIR name"):
        variables.make_usable()


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b', "a$b(c)", "\u00fc", "a%20b", "a&b;c|d"])
def test_other_letters_of_a_folder_are_taken(name, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(variables, "LONGEST", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    variables.make_usable()


@pytest.mark.parametrize("words", [["serve", str(DEMO)], ["serve", "here"], ["verify", str(DEMO)]])
def test_a_working_directory_that_was_removed(words, tmp_path) -> None:
    """Libraries would fail to load, in their own words."""
    (tmp_path / "gone").mkdir()
    script = 'cd "$0" && rmdir "$0" && exec "$@"'
    command = ["sh", "-c", script, str(tmp_path / "gone"), *OURS[:-1], *words]
    said = run(*command, env=environment(PYTHONPATH=str(ROOT)), status=2).stderr
    *steps, last = said.splitlines()
    assert last == (
        "attnres-serve: the working directory no longer exists; change into one that does."
    )
    assert all(re.match(r" +[\d.]+ s  ", step) for step in steps), said  # of a slow start
