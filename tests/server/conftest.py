"""vLLM's own app without an engine, a shared server, and no key in the environment."""

import tempfile
from collections.abc import Iterator

import demo_servers
import pytest
from fastapi import FastAPI
from serving import Server

from attnres_serve.start.engine_log import EngineLog


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Server:
    """The one that a module shares with others, for modules without a server of their own."""
    asks = f"server/{request.path.name}"
    (name,) = (name for name, modules in demo_servers.MODULES.items() if asks in modules)
    return request.getfixturevalue(name)


@pytest.fixture
def anyio_backend() -> str:
    """The loop of tests that are coroutines."""
    return "asyncio"


@pytest.fixture(autouse=True)
def no_key_around(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.fixture(scope="session")
def vllms_app() -> FastAPI:
    """vLLM's app, complete with the plugin, no engine behind it."""
    from bounded_app import KEY
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # 0.28
        from vllm.entrypoints.openai.api_server import build_app

    parser = make_arg_parser(FlexibleArgumentParser())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "attnres")
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # the more routes the better
        args = parser.parse_args(["--model", "x", "--api-key", KEY])
        args.enable_scale_out = True
        return build_app(args, ("generate",))


@pytest.fixture
def completions_of_invocations(vllms_app):
    """What ``/invocations`` reads completions by; the other routes' is of an annotated type."""
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    from attnres_serve.server.bounds import fail_fast

    routes = fail_fast.routes_in(vllms_app.routes)
    found = [adapter for route in routes for adapter in fail_fast.adapters(route)]
    (adapter,) = [adapter for adapter in found if adapter._type is CompletionRequest]
    return adapter


@pytest.fixture
def log(tmp_path, monkeypatch) -> Iterator[EngineLog]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    log = EngineLog("serve")
    yield log
    log.close()
