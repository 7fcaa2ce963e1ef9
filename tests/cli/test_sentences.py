"""No sentence is longer than a line of a terminal or an answer has room for."""

import json
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnres_serve import cli, output, sentences
from attnres_serve.compat import openai_app
from attnres_serve.compat.workarounds import long_refusals
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.formats import house
from attnres_serve.server import refusal
from attnres_serve.server.start.console import Console
from attnres_serve.start import events
from attnres_serve.start.engine_log import EngineLog

MOST = 600  # letters
ARCHITECTURES = ", ".join(f"Some{number}ForCausalLM" for number in range(300))
LONG = {
    "a list": f"Model architectures ['X'] are not supported; supported are: {ARCHITECTURES}.",
    "a list without blanks": f"expected one of {ARCHITECTURES.replace(' ', '')}; correct it.",
    "one word": "x" * 5000,
    "lines": "\n".join(["a line of a library"] * 200),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Stream:
    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, data: str | bytes) -> None:
        self.text += data if isinstance(data, str) else data.decode()


def refused(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli.check, "check", lambda *_: raised(CheckpointError(text)))
        assert cli.main(["check", "nothing"]) == 1
    return capsys.readouterr().err


def raised(error: Exception) -> None:
    raise error


def console(text: str, event: str) -> str:
    err, log = Stream(), EngineLog("test")
    shown = Console(Stream(), err, log, verbose=False)
    shown.event({"event": "checked", "log": False, "headless": False, "socket": None, "title": ""})
    if event == "ended":
        log._failed[1] = {"reason": text}
        shown.ended(1)
        assert str(log.path) in err.text
    else:
        shown.event({"event": event, "reason": text, "text": text})
    log.close()
    return err.text


TERMINALS: dict[str, Callable[[str, pytest.CaptureFixture[str]], str]] = {
    "a command": refused,
    "a refused start": lambda text, _: console(text, "refused"),
    "a failed start": lambda text, _: console(text, "ended"),
    "a warning": lambda text, _: console(text, "warning"),
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
@pytest.mark.parametrize("show", TERMINALS.values(), ids=TERMINALS)
def test_terminals(show, text, capsys, tmp_path) -> None:
    """The sentence says how long it was and where the whole is, which is there."""
    shown = show(text, capsys)
    assert len(shown.strip()) <= MOST
    assert f"(cut from {len(text)} letters; the " in shown
    if kept := shown.partition("the whole is in ")[2].rstrip(")\n"):
        assert Path(kept).read_text() == f"{text}\n"
    else:
        assert "the log has the whole" in shown


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_failures_of_libraries(text) -> None:
    def fail() -> None:
        with output.libraries_hidden("bench"):
            events.tell("failed", reason=text)
            raise RuntimeError("Engine core initialization failed. See root cause above.")

    with pytest.raises(SettingError) as found:
        fail()
    said = str(found.value)
    assert len(said) <= MOST and said.startswith("bench failed (") and "; its log is /" in said
    assert "the log has the whole" in said


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_clients(text, caplog) -> None:
    """Of our answers and of vLLM's; the log has the whole."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.serve.engine import serving

    for patch in long_refusals.PATCHES * 2:  # idempotent
        patch.apply()
    with caplog.at_level(logging.INFO):
        ours = json.loads(refusal.refuse(400, text).body)["error"]["message"]
        cls = serving.ErrorResponse.model_fields["error"].annotation
        theirs = cls(message=text, type="BadRequestError", code=400).message
        short = cls(message="It is short.", type="BadRequestError", code=400).message
    for message in (ours, theirs):
        assert len(message) <= MOST
        assert f"(cut from {len(text)} letters; the server's log" in message
    assert short == "It is short."


@pytest.mark.parametrize("count", [1, 12, 13, 500])
def test_models_that_there_are(count) -> None:
    models = SimpleNamespace(
        base_model_paths=[SimpleNamespace(name=f"model-{number}") for number in range(count)],
        lora_requests={},
    )
    said = openai_app.no_such_model(models, "another")
    assert len(said) <= MOST and "`model-0`" in said
    assert (f"and {count - 12} more" in said) == (count > 12)


def test_a_cut_leaves_whole_words() -> None:
    text = " ".join(f"word{number}" for number in range(500))
    kept = sentences.cut(text, "the rest is elsewhere").partition(" (cut")[0]
    assert text.startswith(kept + " ")
    assert sentences.cut("short", "nowhere") == "short"


def test_families_are_not_listed() -> None:
    for model_type, near in (("attnres_lama", "such as attnres_llama"), ("attnres_zzz", "are.")):
        with pytest.raises(CheckpointError, match=near) as found:
            house.translate({"model_type": model_type})
        assert len(str(found.value)) < 300
