"""The command line as a person meets it: help, vLLM's flags on every build."""

import re

import pytest
from on_file import Sentence
from serving import DEMO as CHECKPOINT

from attnres_serve import cli

DEMO = str(CHECKPOINT)
COMMANDS = ("serve", "check", "convert", "verify", "bench", "inspect")


def help_of(capsys: pytest.CaptureFixture, *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_examples_of_the_command(
    command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each on a line of its own that can be copied, and of flags that there are."""
    monkeypatch.setenv("COLUMNS", "80")
    said = help_of(capsys, command, "--help")
    assert not re.search(r" --\S*-\n", said)  # a flag that a line's end breaks
    examples = said.rpartition("Examples:\n")[2].splitlines()
    assert len(examples) >= 2
    assert all(re.match(f"  attnres-serve {command} [^ ]", line) for line in examples)
    vllms = {"--max-model-len", "--enforce-eager", "--served-model-name"}
    assert set(re.findall(r" (--[\w-]+)", "\n".join(examples))) - vllms <= set(
        re.findall(r"--[\w-]+", said.rpartition("Examples:")[0])
    )


@pytest.mark.parametrize("words", [[], ["help"], ["help", "--help"]])
def test_help_without_a_command(words: list[str], capsys: pytest.CaptureFixture) -> None:
    assert help_of(capsys, *words).startswith("usage: attnres-serve [-h]")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_with_a_command(command: str, capsys: pytest.CaptureFixture) -> None:
    assert help_of(capsys, "help", command) == help_of(capsys, command, "--help") != ""


@pytest.mark.parametrize(
    "words",
    [
        ["sevre", "path"],
        ["Check"],
        ["help", "bnech"],
        ["path/to/checkpoint"],
        [""],
        ["verify", "m", "--port", "80x"],
        ["bench", DEMO, "--port", "80x"],
        ["bench", DEMO, "--port=80"],
        ["inspect", DEMO, "--prompt", "x", "--port", "80x"],
        ["verify", "m", "--tokens", "x"],
        ["verify", "m", "--tokns", "5"],
        ["verify", "m", "--attnres_backend", "cpp"],
        ["bench", DEMO, "--starts", "1.5"],
        ["bench", DEMO, "--batches", "1", "two"],
        ["bench", DEMO, "--attnres-backend", "gpu"],
        ["inspect", DEMO, "--lens"],
        ["inspect", DEMO, "--width", "wide"],
        ["convert", "a", "b", "--to", "c"],
        ["convert", "a", "b", "--block-size", "x"],
        ["check", "m", "--json=1"],
    ],
    ids=lambda words: " ".join(words).replace(DEMO, "DEMO"),
)
def test_words_that_are_no_command_or_that_it_does_not_take(
    words: list[str], capsys: pytest.CaptureFixture, sentence: Sentence
) -> None:
    assert cli.main(words) == 2
    sentence.check(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "there", "elsewhere"),
    [
        # First, as vLLM's parser remembers a topic in its class.
        (["--help=groups"], ["SchedulerConfig", "Frontend", "attnres-serve "], ["--max-num-seqs"]),
        (["--help=all"], ["--max-model-len", "--ssl-keyfile", "--api-key-file"], []),
        (["--help=attnres-serve"], ["--max-sequences", "--attnres-backend"], ["--max-num-seqs"]),
        (["--help=api-key"], ["--api-key-file", "--api-key API_KEY"], ["--max-sequences"]),
        (["--help", "API_KEY_FILE"], ["--api-key-file"], ["--api-key API_KEY"]),
        (["--help", "SchedulerConfig"], ["--max-num-seqs"], ["--ssl-keyfile"]),
    ],
)
def test_flags_are_shown(
    words: list[str], there: list[str], elsewhere: list[str], capsys: pytest.CaptureFixture
) -> None:
    """Ours and vLLM's, by vLLM's parser, on its CPU build too, whose own command cannot start."""
    pytest.importorskip("vllm")
    assert cli.main(["serve", *words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert all(word in said.out for word in there)
    assert not re.search(r"\(default: \S+\)\s+\(default", said.out)
    assert not any(word in said.out for word in elsewhere)
