"""Traces of OpenTelemetry and logs in JSON: docs/use/operations/observability.md."""

import json
import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from faults import until
from serving import Server

from tests.project.test_deploy import metric_names, queries

pytestmark = pytest.mark.engine

SOON = 120  # seconds: every process sends its spans in batches, every five
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_request_is_a_span_of_the_callers_trace(server, collector):
    header = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"model": "demo", "prompt": "import os", "max_tokens": 5}
    answer = server.client.post("/v1/completions", json=body, headers=header).raise_for_status()
    ((resource, span),) = until(
        lambda: [pair for pair in collector[1] if pair[1].trace_id.hex() == TRACE], SOON
    )
    assert (span.name, span.parent_span_id.hex()) == ("llm_request", PARENT)
    said = {item.key: item.value for item in resource.attributes}
    assert said["service.name"].string_value == "attnres-serve"
    attributes = {item.key: item.value for item in span.attributes}
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 5
    assert attributes["gen_ai.latency.time_to_first_token"].double_value > 0
    assert attributes["gen_ai.request.id"].string_value.startswith(answer.json()["id"])


def test_the_start_is_a_trace(server, collector):
    names = {"Load weights", "Worker init"}
    until(lambda: names <= {span.name for _, span in collector[1]}, SOON)


def test_every_line_of_the_log_is_json(server):
    """Of the start, of requests and refusals, of libraries that know no logger."""
    assert server.client.post("/v1/completions", content=b"{").status_code == 400
    said = [json.loads(line) for line in server.log.read_text().splitlines()]
    assert {"vllm.attnres_serve", "uvicorn.access", "stdout"} <= {line["name"] for line in said}
    for line in said:
        assert {"asctime", "levelname", "process", "message"} <= set(line)
        assert time_of(line).utcoffset() == timedelta(0)
    messages = "\n".join(line["message"] for line in said)
    assert "import vLLM" in messages and "Ready after" in messages


def time_of(line: dict[str, Any]) -> datetime:
    """The time of a line, which has to be one of RFC 3339."""
    assert re.fullmatch(r"[\d-]{10}T[\d:]{8}(\.\d+)?\+00:00", line["asctime"]), line
    return datetime.fromisoformat(line["asctime"])


def test_access_lines_have_the_tokens_of_the_usage(server):
    """Of streams that tell no usage, too; and nothing asked them for it."""
    body = {"model": "demo", "prompt": "import os", "max_tokens": 7, "ignore_eos": True}
    shapes = {"whole": {}, "two": {"n": 2}, "batch": {"prompt": ["a b", "c"]}}
    for name, options in shapes.items():
        usage = server.client.post("/v1/completions", json=body | options).json()["usage"]
        for stream in (False, True):
            options = options | {"stream": stream}
            headers = {"X-Request-Id": f"{name}-{stream}"}
            answer = server.client.post("/v1/completions", json=body | options, headers=headers)
            assert answer.status_code == 200 and ("usage" in answer.text) is not stream
            line = until(lambda name=headers["X-Request-Id"]: lines_of(server, name), SOON)[0]
            said = line["tokens_in"], line["tokens_out"]
            assert said == (usage["prompt_tokens"], usage["completion_tokens"])
            assert line["duration_s"] > 0 and line["tokens_per_s"] > 0
    server.client.get("/v1/models", headers={"X-Request-Id": "none"})
    (line,) = until(lambda: lines_of(server, "none"), SOON)
    assert (line["status"], line["path"], line["tokens_out"]) == (200, "/v1/models", None)


def lines_of(server: Server, name: str) -> list[dict]:
    """The access lines of a request."""
    lines = map(json.loads, server.log.read_text().splitlines())
    said = [line for line in lines if line["name"] == "uvicorn.access"]
    assert all("request_id" in line and line["path"] != "/health" for line in said)
    return [line for line in said if line["request_id"] == name]


def test_what_dashboard_and_alerts_ask_for_is_served(server):
    server.complete("import os", max_tokens=2)
    text = server.client.get("/metrics").text
    for where, query in queries():
        # Edits have a sample each, and this server has none: tests/server/test_edits.py sees them.
        for name in {*metric_names(query)} - {"attnres_edits"}:
            assert re.search(rf"^{re.escape(name)}[{{ ]", text, re.M), (where, name)
