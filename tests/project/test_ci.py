"""Which families CI runs for a change: ``.ci/families.py``."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("families", ROOT / ".ci" / "families.py")
assert SPEC is not None and SPEC.loader is not None
chosen_by = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(chosen_by)

KINDS = sorted(chosen_by.KINDS)


def git(root: Path, *words: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)


def commit(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.read_text() + "x\n" if path.exists() else "x\n")
    git(root, "add", ".")
    git(root, "commit", "--message", "x")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of two commits on its main branch."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init")
    commit(folder, "README.md", "kernels/a.py")
    commit(folder, "docs/a.md")
    return folder


def changed(root: Path) -> list[str]:
    base = chosen_by.parent(root)
    assert base is not None
    return chosen_by.changed(root, base)


def test_known_families_are_those_of_the_repository() -> None:
    from attnres_serve.families import FAMILIES

    known = chosen_by.names(ROOT)
    assert {*KINDS} < known <= {*FAMILIES}
    for folder in (*chosen_by.OF_ONE, *chosen_by.OF_ALL):
        assert (ROOT / folder).is_dir(), folder


@pytest.mark.parametrize(
    ("paths", "more", "rule"),
    [
        (["README.md", "server/routes/trace.py"], [], "as nothing changed that a family has"),
        ([], [], "as nothing changed that a family has"),
        (["attnres_serve/families/olmoe.py"], ["olmoe"], "the files of olmoe changed"),
        (["tests/support/facts/phi3.py", "docs/a.md"], ["phi3"], "the files of phi3 changed"),
        (
            ["tests/support/facts/phi3.py", "attnres_serve/families/phi3.py"],
            ["phi3"],
            "the files of phi3 changed",
        ),
        (["attnres_serve/families/llama.py"], [], "the files of llama changed"),
    ],
)
def test_a_change_runs_its_families_and_one_of_each_kind(
    paths: list[str], more: list[str], rule: str
) -> None:
    found, why = chosen_by.families(paths, chosen_by.names(ROOT))
    assert found == sorted([*KINDS, *more]) and rule in why


@pytest.mark.parametrize(
    "path",
    [
        "attnres_serve/model/stage.py",
        "attnres_serve/compat/workarounds/amx.py",
        "kernels/cpp/kernels.cpp",
        "attnres_serve/checkpoints/convert/command.py",
        "attnres_serve/families/rotary.py",
        "tests/support/facts/shared.py",
    ],
)
def test_what_families_share_runs_all(path: str) -> None:
    known = chosen_by.names(ROOT)
    changed = ["attnres_serve/families/olmoe.py", path]
    assert chosen_by.families(changed, known) == (None, f"{path} is shared by all of them")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (["mamba2"], "mamba2"),
        (["llama"], "llama and not gated_llama and not llama4_text"),
        (["gated_llama", "llama"], "gated_llama or llama and not llama4_text"),
        (["olmoe", "qwen3"], "olmoe or qwen3 and not qwen3_moe and not qwen3_next"),
    ],
)
def test_a_family_whose_name_is_within_others_is_chosen_alone(
    chosen: list[str], words: str
) -> None:
    known = {"gated_llama", "llama", "llama4_text", "mamba2", "olmoe"}
    assert chosen_by.expression(chosen, known | {"qwen3", "qwen3_moe", "qwen3_next"}) == words


def test_on_the_main_branch_the_change_is_its_last_commit(root: Path) -> None:
    assert changed(root) == ["docs/a.md"]
    (root / "new.py").write_text("x")
    assert changed(root) == ["docs/a.md", "new.py"]


@pytest.mark.parametrize(
    "last", [("checkout", "own"), ("merge", "--no-ff", "own")], ids=lambda words: words[0]
)
def test_a_branch_and_its_merge_are_the_change_of_all_its_commits(
    last: tuple[str, ...], root: Path
) -> None:
    git(root, "checkout", "-b", "own")
    commit(root, "server/a.py")
    commit(root, "server/b.py")
    git(root, "checkout", "main")
    commit(root, "docs/others.md")
    git(root, *last)
    assert changed(root) == ["server/a.py", "server/b.py"]


def test_a_file_that_was_moved_is_of_both_places(root: Path) -> None:
    git(root, "mv", "kernels/a.py", "server.py")
    git(root, "commit", "--message", "x")
    assert changed(root) == ["kernels/a.py", "server.py"]


def test_without_a_commit_before_it_nothing_is_known(root: Path, tmp_path: Path) -> None:
    """As in a shallow clone, which is what CI may have, and in no repository at all."""
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--depth", "1", f"file://{root}", str(shallow))
    assert chosen_by.parent(shallow) is None
    (tmp_path / "plain").mkdir()
    assert chosen_by.parent(tmp_path / "plain") is None


@pytest.mark.parametrize("shallow", [True, False])
def test_the_command_says_which_rule_chose_what(
    shallow: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(chosen_by, "parent", lambda _: None if shallow else "abc")
    monkeypatch.setattr(chosen_by, "changed", lambda *_: ["README.md"])
    chosen_by.main()
    out, err = capsys.readouterr()
    if shallow:
        assert (out, err) == ("", "all families: git knows no commit before this one.\n")
    else:
        assert out == f"-k '{chosen_by.expression(KINDS, chosen_by.names(ROOT))}'\n"
        assert err.startswith(f"6 families, {', '.join(KINDS)}: one of each kind, as nothing")
