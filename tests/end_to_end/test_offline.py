"""docs/use/offline.md: its script as it stands, and without its guard."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from serving import DEMO, ROOT, environment
from tokenizers import Tokenizer

from attnres_serve.compat import unguarded
from attnres_serve.verify import oracle

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

PAGE = (ROOT / "docs" / "use" / "offline.md").read_text()
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(script)
    env = environment(VLLM_LOGGING_LEVEL="ERROR")
    return subprocess.run(
        [sys.executable, path], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )


def test_the_script_of_the_page(tmp_path: Path) -> None:
    """Its answer is that of float64."""
    done = run(SCRIPT, tmp_path)
    assert done.returncode == 0, done.stderr
    (prompt,), (length,) = (re.findall(given, SCRIPT) for given in (r'te\("(.*?)"', r"ns=(\d+)"))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokens, *_ = oracle.load(DEMO).greedy(tokenizer.encode(prompt).ids, int(length))
    assert done.stdout == tokenizer.decode(tokens) + "\n"


def test_the_script_without_its_guard(tmp_path: Path) -> None:
    """The process of the engine says what is wrong, and that alone."""
    script = SCRIPT.replace('if __name__ == "__main__":', "if True:")
    assert script != SCRIPT
    done = run(script, tmp_path)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.count(unguarded.SENTENCE) == 1 and "freeze_support" not in done.stderr
