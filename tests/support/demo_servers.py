"""Two servers of the demo for all modules that only ask: one without a key, and one with keys.

Each is started once in a process of tests, so the modules that ask one of them run in the same
process (``MODULES``, which ``conftest`` reads).
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from serving import ROOT, Server, running_demo

MODULES = {
    "open_server": (
        *("lens/test_command.py", "lens/test_edit_flags.py", "lens/test_temporary_server.py"),
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
    (folder / "keys").write_text(f"{KEY}\n{SECOND}\n")
    flags = folder / "serve.yaml"
    flags.write_text(yaml.safe_dump(every_flag(folder)))
    with running_demo(folder / "log", "--config", str(flags)) as server:
        server.client.headers["authorization"] = f"Bearer {KEY}"
        yield server


def every_flag(folder: Path) -> dict[str, object]:
    """A file with the flags of the server with keys, every one of ours and many of vLLM's.

    Those without an effect on its tests have the value that holds without them.
    """
    return {
        "model": "replaced by the command line",
        "api-key-file": str(folder / "keys"),
        "max-sequences": SEQUENCES,
        "max_trace_tokens": TRACE_TOKENS,
        "max_trace_weights": WEIGHTS,
        "max_trace_bytes": 64 * 2**20,
        "max-body-bytes": 4 * 2**20,
        "max-concurrent-requests": 1024,
        "drain-delay": 0,
        "public-metrics": False,
        "enable-weight-updates": False,
        "enable-attnres-edits": False,
        "disable_trace": False,
        "verbose": False,
        **{f"attnres-{name}": "auto" for name in ("algorithm", "backend", "native")},
        **{f"attnres_{name}": "auto" for name in ("shard_sites", "aux_stream")},
        "attnres-shard-tokens": 1024,
        "attnres-edit": ["scale=1"],
        "dtype": "float32",
        "max-model-len": KEYED_CONTEXT,
        "max_num_batched_tokens": CHUNK,
        "max-num-seqs": 8,
        "allowed-origins": [],
        "allowed-methods": ["*"],
        "allow-credentials": False,
        "enable-prefix-caching": True,
        "enable_chunked_prefill": True,
        "tensor-parallel-size": 1,
        "pipeline_parallel_size": 1,
        "kv-cache-dtype": "auto",
        "load-format": "auto",
        "tokenizer-mode": "auto",
        "generation-config": "auto",
        "override-generation-config": {},
        "hf-overrides": {},
        "max-logprobs": 20,
        "seed": 0,
        "trust-remote-code": False,
        "scheduling-policy": "fcfs",
        "h11-max-header-count": 256,
        "disable-log-stats": False,
        "response-role": "assistant",
        "shutdown-timeout": 20,
    }


def words(flags: dict[str, object]) -> list[str]:
    return [str(word) for pair in flags.items() for word in pair]
