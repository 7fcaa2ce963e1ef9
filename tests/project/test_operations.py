"""docs/use/operations/: every flag of ours, with its default and what else it may be."""

import argparse
import re
from pathlib import Path

from attnres_serve import settings
from attnres_serve.server import launcher, metrics

PAGES = sorted((Path(__file__).parents[2] / "docs" / "use" / "operations").glob("*.md"))
PAGE = "\n".join(path.read_text() for path in PAGES)
FLAGS = dict(re.findall(r"^\| `(--[a-z-]+)[^`]*` \| (.*? \| .*) \|$", PAGE, re.M))


def test_every_flag_is_on_the_page():
    """But for the address, which is vLLM's flag with another default."""
    parser = argparse.ArgumentParser()
    launcher.add_arguments(parser)
    for action in parser._actions:
        (flag,) = action.option_strings[:1]
        if flag in ("-h", "--host", "--port"):
            continue
        default, said = FLAGS[flag].split(" | ", 1)
        if isinstance(action.default, int) and action.nargs != 0:
            assert default == str(action.default)
        for choice in action.choices or ():
            assert f"`{choice}`" in default + said


def test_metrics_and_what_is_refused_are_on_the_page():
    for name in [*launcher.UNPROTECTED, *(one.describe()[0].name for one in metrics.SERVED)]:
        assert f"`{name}" in PAGE


def test_the_keys_for_vllms_own_command_are_on_the_page():
    assert all(f"`{key}`" in PAGE for key in settings.KEYS)


def test_the_index_names_every_page():
    index = next(path for path in PAGES if path.stem == "README").read_text()
    linked = set(re.findall(r"^\| \[.*?\]\((\w+\.md)\)", index, re.M))
    assert linked | {"README.md"} == {path.name for path in PAGES}
