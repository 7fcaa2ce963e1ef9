"""A first request to a server, for a person to paste into a terminal."""

import json
import shlex


def request(url: str, socket: str | None, model: str, has_key: bool, takes_text: bool) -> str:
    """The lines of a command that asks for a completion.

    Args:
        url: of the server.
        socket: the path of the file by which it is reached; None for a port.
        model: a name of the served model.
        has_key: whether the server asks for a key, in whose place a placeholder stands.
        takes_text: whether prompts may be text; without a tokenizer they are numbers of tokens.
    """
    prompt = "import os\n\n\ndef " if takes_text else [0]
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 40}, ensure_ascii=False)
    place = f"--unix-socket {shlex.quote(socket)} " if socket else ""
    lines = [
        f"curl {place}{shlex.quote(f'{url}/v1/completions')} -H 'Content-Type: application/json'",
        *(["-H 'Authorization: Bearer YOUR_KEY'"] if has_key else ()),
        f"-d {shlex.quote(body)}",
    ]
    return " \\\n  ".join(lines)
