"""A trace as one HTML file: the figures of the server's page, without a server or a network.

A script in a file cannot import modules.  So the page's modules become functions of one script, in
the order of their imports.  They import and export only by names:
``import { a, b } from "./other.js";``, and ``export`` before a function or a constant.
"""

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "server" / "static"
SERVER_ONLY = re.compile(r"<!-- server -->.*?<!-- /server -->\n", re.S)
STYLE = re.compile(r'<link rel="stylesheet" href="attn_res/([^"]+)">')
SCRIPT = re.compile(r'<script type="module" src="attn_res/([^"]+)"></script>')
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./([^"]+)";$', re.M)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|class) (\w+))", re.M)


def html(trace: dict[str, Any]) -> str:
    """The page of a trace, including the trace, the style sheet and every script.

    Args:
        trace: the response of ``POST /v1/attn_res/trace``.
    """
    # No `<`, so that no text of a token ends the element.  Browsers do not run scripts of this
    # type.
    data = json.dumps(trace, separators=(",", ":")).replace("<", "\\u003c")
    page = SERVER_ONLY.sub("", _read("index.html"))
    page = page.replace(
        "</main>\n", f'</main>\n<script type="application/json" id="trace">{data}</script>\n', 1
    )
    styles = [_read(name) for name in STYLE.findall(page)]
    scripts = [script(name) for name in SCRIPT.findall(page)]
    policy = (
        f"default-src 'none'; style-src {_hashes(styles)}; script-src {_hashes(scripts)}; "
        "base-uri 'none'; form-action 'none'"
    )
    charset = '<meta charset="utf-8">\n'
    meta = f'{charset}<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    page = page.replace(charset, meta, 1)
    page = STYLE.sub(lambda _: f"<style>{styles.pop(0)}</style>", page)
    return SCRIPT.sub(lambda _: f"<script>{scripts.pop(0)}</script>", page)


def script(name: str) -> str:
    """A module and all its imports as one script without imports."""
    functions: dict[str, str] = {}
    _collect(name, functions)
    return '"use strict";\nconst modules = {};\n' + "".join(functions.values())


def _collect(name: str, functions: dict[str, str]) -> None:
    """Add a module as a function, after the modules that it imports."""
    if name in functions:
        return
    code = _read(name)
    for _, other in IMPORT.findall(code):
        _collect(other, functions)
    exported = ", ".join(EXPORT.findall(code))
    code = IMPORT.sub(_constants, code)
    body = EXPORT.sub("", code)
    functions[name] = f'modules["{name}"] = (() => {{\n{body}return {{ {exported} }};\n}})();\n'


def _constants(match: re.Match[str]) -> str:
    names, other = match.groups()
    return f'const {names} = modules["{other}"];'


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> str:
    """Hashes with which a browser runs these texts and no others."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in texts)
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
