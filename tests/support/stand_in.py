"""What vLLM's server would be started with."""

import argparse

import pytest


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """vLLM's arguments, in the place of a server."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    found: list[argparse.Namespace] = []
    monkeypatch.setattr(ServeSubcommand, "cmd", staticmethod(found.append))
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    return found
