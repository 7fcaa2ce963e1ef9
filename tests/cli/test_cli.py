"""The command line as a person meets it: help, vLLM's flags on every build."""

import re

import pytest
from serving import DEMO as CHECKPOINT

from attnres_serve import cli

DEMO = str(CHECKPOINT)
COMMANDS = ("serve", "check", "convert", "verify", "bench", "inspect")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_examples_of_the_command(
    command: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each on a line of its own that can be copied, and of flags that there are."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    said = capsys.readouterr().out
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
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: attnres-serve [-h]")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_with_a_command(command: str, capsys: pytest.CaptureFixture) -> None:
    said = []
    for words in (["help", command], [command, "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(words)
        assert ended.value.code == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sevre", "path"], "'sevre' is no command; did you mean serve?"),
        (["Check"], "'Check' is no command; did you mean check?"),
        (["help", "bnech"], "'bnech' is no command; did you mean bench?"),
        (["path/to/checkpoint"], "'path/to/checkpoint' is no command; expected one of serve, "),
        ([""], "'' is no command; expected one of serve, check, convert, "),
    ],
)
def test_a_word_that_is_no_command(words, said, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"attnres-serve: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["verify", "m", "--port", "80x"],
            "found --port, which is no flag; `attnres-serve verify ",
        ),
        (
            ["bench", DEMO, "--port", "80x"],
            "found --port, which is no flag of an engine alone; lea",
        ),
        (["bench", DEMO, "--port=80"], "found --port, which is no flag of an engine alone; leave"),
        (["inspect", DEMO, "--prompt", "x", "--port", "80x"], "found --port 80x; expected a whole"),
        (["verify", "m", "--tokens", "x"], "found --tokens x; expected a whole number."),
        (
            ["verify", "m", "--tokns", "5"],
            "found --tokns, which is no flag; did you mean --tokens?",
        ),
        (
            ["verify", "m", "--attnres_backend", "cpp"],
            "found --attnres_backend, which is no flag; did",
        ),
        (["bench", DEMO, "--starts", "1.5"], "found --starts 1.5; expected a whole number."),
        (["bench", DEMO, "--batches", "1", "two"], "found --batches two; expected a whole number."),
        (
            ["bench", DEMO, "--attnres-backend", "gpu"],
            "found --attnres-backend gpu; expected one o",
        ),
        (["inspect", DEMO, "--lens"], "found --lens without a value; expected a whole number."),
        (["inspect", DEMO, "--width", "wide"], "found --width wide; expected a number."),
        (["convert", "a", "b", "--to", "c"], "found --to c; expected one of house."),
        (["convert", "a", "b", "--block-size", "x"], "found --block-size x; expected a whole num"),
        (["check", "m", "--json=1"], "found --json with a value, which takes none"),
    ],
)
def test_a_flag_that_a_command_does_not_take(words, said, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"attnres-serve: {said}")


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
