"""Sentences on file: each belongs to a test, and one that was reworded fails it."""

import pytest
from on_file import TESTS, Sentence, on_file, without_a_test

ROOMS = sorted(path.stem for path in (TESTS / "sentences").glob("*.json"))


@pytest.mark.parametrize("room", ROOMS)
def test_every_entry_has_its_test(room: str) -> None:
    """Else run `pytest --renew-sentences FILE`, or take out what belongs to no function."""
    for key in on_file(room):
        file, _, name = key.partition("::")
        source = TESTS / room / file
        assert source.is_file(), key
        assert f"def {name.partition('[')[0]}(" in source.read_text(encoding="utf-8"), key
    assert without_a_test(room) == []


def test_a_sentence_is_compared_in_full(sentence: Sentence) -> None:
    sentence.renews = False
    sentence.check("A first sentence.\n")
    for other in ("A second", "A second sentence of two.", "A second sentence"):
        with pytest.raises(pytest.fail.Exception, match=r"on file: A second sentence\.\nIf what"):
            sentence.check(other)
        sentence.said.pop()
    with pytest.raises(AssertionError, match="was not said"):
        sentence.end()
    sentence.check("A second sentence.")
    with pytest.raises(pytest.fail.Exception, match="on file: nothing"):
        sentence.check("A third one.")
    sentence.said.pop()


def test_paths_are_placeholders(sentence: Sentence, tmp_path) -> None:
    sentence.check(f"{tmp_path}/x and {TESTS.parent}/y.")
