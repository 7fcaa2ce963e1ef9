"""Two servers of the demo for all modules that only ask: one without a key, and one with keys.

Each is started once in a process of tests, so the modules that ask one of them run in the same
process (``MODULES``, which ``conftest`` reads).
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from serving import ROOT, Server, running_demo

MODULES = {
    "open_server": (
        *("lens/test_command.py", "lens/test_edit_flags.py", "lens/test_own_server.py"),
        *("project/test_readme.py", "server/test_clients.py", "server/test_company.py"),
        *("server/test_observability.py", "server/test_openai.py"),
        *("server/test_published_schema.py", "server/test_server.py"),
    ),
    "keyed_server": (
        *("server/test_limits_server.py", "server/test_page.py", "server/test_trace_server.py"),
    ),
}
NAMES = ["demo", "team/demo v2"]
CONTEXT = 512  # of the open server
KEY, SECOND = "a-key-of-the-test", "another-key-of-the-test"
# Bounds of the server with keys.
KEYED_CONTEXT, SEQUENCES = 1024, 4
CHUNK = 64  # tokens
TRACE_TOKENS = 512
WEIGHTS = 29000  # 57 sources of all sites together, times 508 tokens


@pytest.fixture(scope="session")
def collector() -> Iterator[tuple[str, list]]:
    """Address of a collector of traces, and the spans that came: resource, span."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(
                    (group.resource, span) for scope in group.scope_spans for span in scope.spans
                )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/v1/traces", spans
        listening.shutdown()


@pytest.fixture(scope="session")
def open_server(collector, tmp_path_factory) -> Iterator[Server]:
    """In float32, with two names, traces of OpenTelemetry and a log in JSON."""
    flags = {
        "--dtype": "float32",
        "--max-model-len": CONTEXT,
        "--max-sequences": 8,
        "--otlp-traces-endpoint": collector[0],
    }
    env = {
        "OTEL_SERVICE_NAME": "attnres-serve",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "VLLM_LOGGING_CONFIG_PATH": str(ROOT / "deploy" / "logging.json"),
    }
    log = tmp_path_factory.mktemp("open") / "log"
    with running_demo(log, "--served-model-name", *NAMES, *words(flags), **env) as server:
        yield server


@pytest.fixture(scope="session")
def keyed_server(tmp_path_factory) -> Iterator[Server]:
    """In float32, with two keys, narrow bounds and prompts in chunks; its client has a key."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = folder / "keys"
    keys.write_text(f"{KEY}\n{SECOND}\n")
    flags = {
        "--api-key-file": keys,
        "--dtype": "float32",
        "--max-model-len": KEYED_CONTEXT,
        "--max-num-batched-tokens": CHUNK,
        "--max-num-seqs": 8,
        "--max-sequences": SEQUENCES,
        "--max-trace-tokens": TRACE_TOKENS,
        "--max-trace-weights": WEIGHTS,
    }
    with running_demo(folder / "log", *words(flags)) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


def words(flags: dict[str, object]) -> list[str]:
    return [str(word) for pair in flags.items() for word in pair]
