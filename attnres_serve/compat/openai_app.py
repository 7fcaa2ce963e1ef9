"""vLLM's FastAPI app: its routes, headers, state and end."""

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from attnres_serve import sentences
from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds.long_refusals import for_client


def served_names(state) -> list[str]:
    """The names of the served model, from the state of vLLM's app."""
    return [model.name for model in state.openai_serving_models.base_model_paths]


def no_such_model(models, name: str) -> str:
    """The sentence for a name that neither the served model nor an adapter has.

    A name that is a path of this machine is not told.

    Args:
        models: vLLM's ``openai_serving_models``.
        name: that was asked for.
    """
    names = [*(model.name for model in models.base_model_paths), *models.lora_requests]
    listed = sentences.some(f"`{one}`" for one in names if not os.path.isabs(one))
    there_is = f"there is {listed}" if listed else "GET /v1/models lists those that do"
    return for_client(f"The model `{name}` does not exist; {there_is}.")


async def model_cards(state) -> list[dict[str, Any]]:
    """The entries of ``GET /v1/models``: the served model under all its names, and adapters."""
    listed = await state.openai_serving_models.show_available_models()
    return [card.model_dump() for card in listed.data]


def on_shutdown(client, drain: Callable[[float], float]) -> None:
    """Let requests end before vLLM stops its engine, and let the server of a dead engine fail.

    vLLM calls ``client.shutdown`` in a thread when a signal is heard, with the seconds of
    --shutdown-timeout, and at the end of the server in any case.  A server that ends because its
    engine did would have the status 0.

    Args:
        client: vLLM's engine client.
        drain: told how long it may wait; returns how long the engine may then take to end.
    """
    called = False

    def draining(stop: Callable[..., None]) -> Callable[..., None]:
        def shutdown(timeout: float | None = None) -> None:
            nonlocal called
            died = False
            if not called:
                called = True
                timeout = drain(timeout or 0)
                died = client.errored
                # vLLM would log that its engine is dead, if that has ended before the handler does.
                handler = getattr(client, "output_handler", None)
                if timeout and handler is not None and not died:
                    handler.get_loop().call_soon_threadsafe(handler.cancel)
            stop(timeout=timeout)
            if died:
                raise SystemExit(1)

        return shutdown

    SHUTDOWN.apply_to(client, draining)


def around(app, wrap: Callable) -> None:
    """Wrap an app with all of its middleware, also what vLLM adds after plugins were asked."""
    MIDDLEWARE.apply_to(app, lambda build: lambda: wrap(build()))


def guard_instead_of_vllm(app) -> None:
    """Leave out vLLM's own middleware for keys, which refuses in a shape that no client reads.

    To be called where another one guards every route: vLLM's covers some prefixes of paths.
    """

    def without(build: Callable) -> Callable:
        def build_without():
            kept = [one for one in app.user_middleware if not _is_vllms_guard(one.cls)]
            app.user_middleware = kept
            return build()

        return build_without

    MIDDLEWARE.apply_to(app, without)


def _is_vllms_guard(middleware) -> bool:
    name = getattr(middleware, "__name__", "")
    return name == "AuthenticationMiddleware" and middleware.__module__.startswith("vllm.")


def has_paths_without_access_lines(args) -> bool:
    """Whether vLLM was told which paths have no access line; it leaves those out by itself."""
    return getattr(args, "disable_access_log_for_endpoints", None) is not None


def outlives_engine() -> bool:
    """Whether the server is to stay when its engine is dead, as vLLM's variable says."""
    from vllm import envs

    return envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH


def url_of(state) -> str:
    """The address by which a client on this machine reaches a server that listens.

    Args:
        state: of vLLM's app.
    """
    args = state.args
    path = (args.root_path or "").rstrip("/")
    if socket_of(state):
        return f"http://localhost{path}"
    host = args.host or ""
    if host in ("", "0.0.0.0", "::"):  # every address of the machine
        host = "localhost"
    host = f"[{host}]" if ":" in host else host
    port = state.server.servers[0].sockets[0].getsockname()[1]  # of --port 0 the one that was free
    scheme = "https" if args.ssl_keyfile else "http"
    return f"{scheme}://{host}:{port}{path}"


def socket_of(state) -> str | None:
    """The path of the socket file by which a server is reached; None for one with a port."""
    return getattr(state.args, "uds", None) or None


def read_http_by(protocol: str) -> None:
    """Name the class that reads HTTP where uvicorn would choose its own for httptools.

    vLLM leaves the choice to uvicorn, and sets the bounds of headers for h11 alone.
    """
    from importlib.util import find_spec

    from uvicorn.config import HTTP_PROTOCOLS

    if find_spec("httptools"):
        PROTOCOL.apply_to(HTTP_PROTOCOLS, lambda original: protocol)


def refuse_bodies_by(handler: Callable) -> None:
    """Have vLLM's app answer bodies that it cannot read by a handler of ours.

    vLLM sets its own when plugins have attached their routes.
    """
    replace(BODIES, make=lambda original: handler).apply()


def header_bounds(config) -> tuple[int, int]:
    """Bytes and number of a request's headers by vLLM's flags, as it leaves them with uvicorn."""
    return config.h11_max_incomplete_event_size, config.h11_max_header_count


def closed_routes(args) -> dict[str, str]:
    """Routes that vLLM has on every server, and the flag without which they have no use."""
    elastic = getattr(args, "enable_elastic_ep", False)
    return {} if elastic else {"/scale_elastic_ep": "--enable-elastic-ep"}


INVOCATIONS = "/invocations"  # reads its body by itself, to find out what is asked for


def adapters_of_invocations(endpoint: Callable) -> list:
    """The pydantic adapters that ``/invocations`` reads bodies by, which it closes over.

    Raises:
        TypeError: it closes over none.
    """
    adapters = list(_adapters(endpoint))
    if not adapters:
        raise TypeError(f"{INVOCATIONS} has no adapters")
    return adapters


def _adapters(value) -> Iterator:
    """Those that a function closes over, also in lists and in functions that it wraps."""
    from pydantic import TypeAdapter

    if isinstance(value, TypeAdapter):
        yield value
    for cell in getattr(value, "__closure__", None) or ():
        yield from _adapters(cell.cell_contents)
    for entry in value if isinstance(value, list | tuple) else ():
        yield from _adapters(entry)


_SERVER = "every model of our server"
SHUTDOWN = Patch(
    targets=("shutdown",),
    of="one engine's client",
    why="running requests were cut off, and a server whose engine died ended with the status 0",
    models=_SERVER,
    first=(0, 28),
)
MIDDLEWARE = Patch(
    targets=("build_middleware_stack",),
    of="vLLM's FastAPI app",
    why="keys guarded a part of the routes, and an access line needs the whole of a request",
    models=_SERVER,
    first=(0, 28),
)
PROTOCOL = Patch(
    targets=("auto",),
    of="`uvicorn.config.HTTP_PROTOCOLS`",
    why="headers were bounded for h11 alone",
    models=_SERVER,
    first=(0, 28),
    report="headers-of-httptools",
)
BODIES = Patch(
    targets=("vllm.entrypoints.serve.exception_handling.register:validation_exception_handler",),
    why="a refusal of a body repeated it, and had no single sentence",
    models=_SERVER,
    first=(0, 28),
    report="errors-of-a-body",
)


def include_weight_routes(app, paths: Collection[str]) -> None:
    """Add those of vLLM's routes for a trainer that have one of the paths."""
    from vllm.entrypoints.rl.online.api_router import router

    app.router.routes += [route for route in router.routes if route.path in paths]
