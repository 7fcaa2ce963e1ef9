"""An example of a request to a server, to paste into a terminal."""

import json
import shlex


def request(url: str, socket: str | None, model: str, has_key: bool, takes_text: bool) -> str:
    """A curl command that requests a completion.

    Args:
        url: the server's address.
        socket: the path of its socket file; None for a port.
        model: a name of the served model.
        has_key: whether the server needs a key, for which the command has a placeholder.
        takes_text: whether prompts may be text; without a tokenizer they are token ids.
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
