"""The command line as a person meets it: help, vLLM's flags on every build, completion."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import DEMO

from attnres_serve import cli

COMMANDS = ("serve", "check", "convert", "verify", "bench", "inspect")


def run(*words: object, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "attnres_serve", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"} | environment,
        timeout=180,
    )


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


def test_help_tells_of_examples_and_completion(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    said = capsys.readouterr().out
    assert "\n  attnres-serve serve path/to/checkpoint" in said and "--print-completion" in said


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "m", "--attnres-algorithm", "score_on_write"),
        ("serve", "m", "--attnres-algorithm=score_on_write"),
        ("verify", "m", "--attnres-algorithm", "score_on_write"),
        ("bench", "m", "--attnres-algorithm", "score_on_write"),
    ],
)
def test_the_algorithm_that_was_dropped(
    words: tuple[str, ...], capsys: pytest.CaptureFixture
) -> None:
    """It is refused in a sentence that says why, not as a name that never was."""
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "error: " in line)
    assert stopped.value.code == 2 and "score_on_write was dropped, because it was slower" in said
    assert said.endswith("expected one of single_pass, two_phase, auto.")


@pytest.mark.parametrize(
    ("words", "topic"),
    [
        (["serve", "--help=all"], "all"),
        (["serve", "m", "--help", "ModelConfig"], "ModelConfig"),
        (["serve", "-h", "all"], "all"),
        (["serve", "--help"], None),
        (["serve", "--help", "--port"], None),
        (["check", "--help", "all"], None),
        (["serve", "m", "--port", "1"], None),
    ],
)
def test_the_topic_of_a_help(words: list[str], topic: str | None) -> None:
    assert cli._topic(words) == topic


@pytest.mark.parametrize(
    ("words", "there", "elsewhere"),
    [
        # First, as vLLM's parser remembers a topic in its class.
        (["--help=groups"], ["SchedulerConfig", "Frontend"], ["--max-num-seqs"]),
        (["--help=all"], ["--max-model-len", "--tensor-parallel-size", "--ssl-keyfile"], []),
        (["--help", "SchedulerConfig"], ["--max-num-seqs"], ["--ssl-keyfile"]),
    ],
)
def test_vllms_flags_are_shown(
    words: list[str], there: list[str], elsewhere: list[str], capsys: pytest.CaptureFixture
) -> None:
    """By vLLM's parser, on its CPU build too, whose own command cannot start."""
    pytest.importorskip("vllm")
    assert cli.main(["serve", *words]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert all(word in said.out for word in there)
    assert not any(word in said.out for word in elsewhere)


@pytest.fixture(scope="module")
def script() -> str:
    pytest.importorskip("shtab")
    done = run("--print-completion", "bash")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("words", "answers"),
    [
        (["insp"], {"inspect"}),
        (["serve", "--attnres-alg"], {"--attnres-algorithm"}),
        (["serve", "m", "--attnres-algorithm", "two"], {"two_phase"}),
        (["serve", "m", "--enforce-eager", "--max-model"], {"--max-model-len"}),
        (["bench", "m", "--tensor-par"], {"--tensor-parallel-size"}),
        (["inspect", "--fr"], {"--from"}),
        (["check", "exam"], {"examples"}),
    ],
)
def test_bash_completes(words: list[str], answers: set[str], script: str) -> None:
    """Commands, flags of ours and of vLLM's, their choices and folders; nothing else is started."""
    pytest.importorskip("vllm")
    asked = " ".join(["attnres-serve", *words])
    shell = f"""{script}
COMP_WORDS=({asked}) COMP_CWORD={len(words)} COMP_LINE="{asked}" COMP_POINT={len(asked)}
_shtab_attnres_serve attnres-serve '{words[-1]}' '{words[-2:][0]}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["/bin/bash", "--norc", "-c", shell],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(DEMO).parents[2],
        env={"PATH": "/nowhere"},
    )
    assert (set(done.stdout.split()), done.stderr) == (answers, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_a_script_is_made_without_anything_heavy(shell: str) -> None:
    pytest.importorskip("shtab")
    code = f"""
import sys
from attnres_serve import cli
try:
    cli.main(["--print-completion", "{shell}"])
finally:
    assert not {{"torch", "vllm", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_completion_without_its_library_is_one_sentence() -> None:
    code = """
import sys
sys.modules["shtab"] = None
from attnres_serve import cli
sys.exit(cli.main(["--print-completion", "bash"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "shtab" in done.stderr and "extra completion" in done.stderr
