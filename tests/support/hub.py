"""A Hugging Face hub of folders on this machine, as far as checkpoints are read by it, and a cache.

``server(FOLDER)`` serves ``FOLDER/REVISION/*`` as the model ``someone/model``.  A revision may be
asked for by its name or, as the hub's client does when it has been told, by its commit.
"""

import hashlib
import json
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

MODEL = "someone/model"


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


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
            asked, _, name = path.removeprefix(f"/{MODEL}/resolve/").partition("/")
            file = self.root / self.revision(asked) / name
            return self.send(file.read_bytes(), asked, with_body) if file.is_file() else self.no()
        for kind in ("tree", "revision"):
            prefix = f"/api/models/{MODEL}/{kind}/"
            if path.startswith(prefix):
                asked = path.removeprefix(prefix).split("/")[0]
                listed = [
                    {"type": "file", "path": f.name, "rfilename": f.name, "size": f.stat().st_size}
                    | {"oid": "0" * 40}
                    for f in sorted((self.root / self.revision(asked)).iterdir())
                ]
                commit = commit_of(self.revision(asked))
                model = {"id": MODEL, "sha": commit, "siblings": listed}
                content = json.dumps(listed if kind == "tree" else model).encode()
                return self.send(content, asked, with_body)
        return self.no()

    def revision(self, asked: str) -> str:
        commits = {commit_of(folder.name): folder.name for folder in self.root.iterdir()}
        return commits.get(asked, asked)

    def send(self, content: bytes, asked_revision: str, with_body: bool) -> None:
        status, whole = 200, len(content)
        etag = hashlib.sha256(content).hexdigest()
        if asked := self.headers.get("Range"):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            status, content = 206, content[int(first) : int(last or whole) + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit_of(self.revision(asked_revision)))
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


def cached(hub: Path, checkpoint: Path, *left_out: str) -> Path:
    """Have a checkpoint as ``someone/model`` in the cache ``hub``; returns its snapshot."""
    model = hub / f"models--{MODEL.replace('/', '--')}"
    shutil.copytree(checkpoint, model / "blobs", ignore=shutil.ignore_patterns(*left_out))
    snapshot = model / "snapshots" / "abc"
    for folder in (snapshot, model / "refs"):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text("abc")
    for path in (model / "blobs").iterdir():
        (snapshot / path.name).symlink_to(path)
    return snapshot
