"""A Hugging Face hub of folders on this machine, as much of it as checkpoints are read by.

``python hub.py FOLDER`` serves ``FOLDER/REVISION/*`` as the model ``someone/model`` and prints its
address; the headers that the hub's client asks for name the revision as the commit.
"""

import hashlib
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MODEL = "someone/model"


class Hub(BaseHTTPRequestHandler):
    root: Path
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"/{MODEL}/resolve/"):
            revision, _, name = path.removeprefix(f"/{MODEL}/resolve/").partition("/")
            file = self.root / revision / name
            return (
                self.send(file.read_bytes(), revision, with_body) if file.is_file() else self.no()
            )
        for kind in ("tree", "revision"):
            if path.startswith(f"/api/models/{MODEL}/{kind}/"):
                revision = path.split("/")[6]
                files = sorted((self.root / revision).iterdir())
                listed = [
                    {"type": "file", "path": f.name, "rfilename": f.name, "size": f.stat().st_size}
                    | {"oid": "0" * 40}
                    for f in files
                ]
                model = {"id": MODEL, "sha": revision, "siblings": listed}
                content = json.dumps(listed if kind == "tree" else model).encode()
                return self.send(content, revision, with_body)
        return self.no()

    def send(self, content: bytes, revision: str, with_body: bool) -> None:
        status, whole = 200, len(content)
        etag = hashlib.sha256(content).hexdigest()
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            status, content = 206, content[int(first) : int(last or whole) + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", hashlib.sha1(revision.encode()).hexdigest())
        if status == 206:
            end = int(first) + len(content) - 1
            self.send_header("Content-Range", f"bytes {first}-{end}/{whole}")
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def no(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


def server(root: Path) -> ThreadingHTTPServer:
    """A server on a free port of this machine, not yet running."""
    return ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHub", (Hub,), {"root": root}))


if __name__ == "__main__":
    hub = server(Path(sys.argv[1]))
    print(f"http://127.0.0.1:{hub.server_address[1]}", flush=True)
    hub.serve_forever()
