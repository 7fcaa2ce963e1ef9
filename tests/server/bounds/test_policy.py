"""Files of keys, and bounds that are no numbers."""

import pytest
from serving import GOLDENS

pytest.importorskip("vllm")


from attnres_serve import cli
from attnres_serve.compat import openai_server
from attnres_serve.server.bounds.policy import read_keys

GOLDEN = str(GOLDENS / "fla_transformer_block")


def test_keys_of_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_bytes(b"first\r\n\n  second-~!  \n")
    assert read_keys(str(path)) == ["first", "second-~!"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b"", "has no API key"),
        (b" \n\n", "has no API key"),
        (b"good\n# a comment\n", "line 2"),
        (b"two words\n", "line 1"),
        ("schlüssel\n".encode(), "line 1"),
        (b"good\n\x00\n", "line 2"),
    ],
    ids=str,
)
def test_a_file_without_keys_is_refused(tmp_path, capfd, monkeypatch, content, said):
    """In one sentence that shows no key, before anything starts."""
    monkeypatch.setattr(openai_server, "run_server", lambda *_: pytest.fail("it was served"))
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["serve", GOLDEN, "--api-key-file", str(path)]) == 2
    err = capfd.readouterr().err
    assert err.startswith("attnres-serve: ") and err.count("\n") == 1
    assert said in err and str(path) in err
    assert "good" not in err and "words" not in err


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        *(("--max-sequences", value) for value in ("0", "-1", "x", "1.5")),
        *(("--max-trace-weights", "0"), ("--drain-delay", "-1")),
    ],
)
def test_a_bound_is_a_positive_number(flag, value, capfd):
    assert cli.main(["serve", GOLDEN, flag, value]) == 2
    assert f"found {flag} {value}; expected a whole number of at" in capfd.readouterr().err
