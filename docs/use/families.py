"""Writes ``families.md`` beside this file from what the package knows of its families.

python docs/use/families.py
"""

from pathlib import Path

from attnres_serve.families import FAMILIES

PAGE = Path(__file__).with_name("families.md")
HEAD = """\
<!-- Written by families.py from attnres_serve/families/; a test compares them. -->

# Families

| family | `model_type` | `architectures` | Hugging Face |
|---|---|---|---|
"""
TAIL = """
The backbones that are served. In the [house format](formats.md#house-format) each has a
`model_type` and an architecture of its own. The rest of its config.json and the names of its
tensors are those of the Hugging Face model type. [Add another](../build/add-a-family.md).
"""


def text() -> str:
    """The page."""
    rows = (
        f"| {family.title} | `{family.model_type}` | `{family.architecture}` | `{family.hf}` |\n"
        for family in FAMILIES.values()
    )
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
