"""docs/use/clients.md: the lines of each client."""

import re

from serving import ROOT

PAGE = ROOT / "docs" / "use" / "clients.md"


def block(heading: str, language: str) -> str:
    """The first block of a language below a heading of the page."""
    below = PAGE.read_text().split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    found = re.search(rf"^```{language}\n(.*?)^```$", below, re.M | re.S)
    assert found, f"no block of {language} below {heading}"
    return found[1]
