"""vLLM's FastAPI app: routes, headers, state and shutdown."""

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
    """The sentence for an unknown name of a model.

    Names that are paths of this machine are not listed.

    Args:
        models: vLLM's ``openai_serving_models``.
        name: of the request.
    """
    names = [*(model.name for model in models.base_model_paths), *models.lora_requests]
    listed = sentences.some(f"`{one}`" for one in names if not os.path.isabs(one))
    there_is = f"there is {listed}" if listed else "GET /v1/models lists those that do"
    return for_client(f"The model `{name}` does not exist; {there_is}.")


async def model_cards(state) -> list[dict[str, Any]]:
    """The entries of ``GET /v1/models``: all names of the served model, and adapters."""
    listed = await state.openai_serving_models.show_available_models()
    return [card.model_dump() for card in listed.data]


def on_shutdown(client, drain: Callable[[float], float]) -> None:
    """Let requests end before vLLM stops its engine, and exit with an error if the engine died.

    vLLM calls ``client.shutdown`` in a thread after a signal, with the seconds of
    --shutdown-timeout, and at the end of the server in any case.  Without this, a server whose
    engine died exits with status 0.

    Args:
        client: vLLM's engine client.
        drain: a function of the seconds to wait; returns the seconds left for the engine's end.
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
                # vLLM would log a dead engine if the engine ended before this handler.
                handler = getattr(client, "output_handler", None)
                if timeout and handler is not None and not died:
                    handler.get_loop().call_soon_threadsafe(handler.cancel)
            stop(timeout=timeout)
            if died:
                raise SystemExit(1)

        return shutdown

    SHUTDOWN.apply_to(client, draining)


def around(app, wrap: Callable) -> None:
    """Wrap an app with all middleware, including that which vLLM adds after loading plugins."""
    MIDDLEWARE.apply_to(app, lambda build: lambda: wrap(build()))


def guard_instead_of_vllm(app) -> None:
    """Remove vLLM's middleware for keys, whose refusals have a shape that no client reads.

    Call this only with another guard for every route: vLLM's covers only some paths.
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
    """Whether a vLLM flag states paths without access lines; vLLM then omits them itself."""
    return getattr(args, "disable_access_log_for_endpoints", None) is not None


def outlives_engine() -> bool:
    """Whether the server stays after its engine's death, by vLLM's variable."""
    from vllm import envs

    return envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH


def url_of(state) -> str:
    """The address of a listening server for clients on this machine.

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
    # Each of several API servers accepts by vLLM's code, and uvicorn's list is empty.
    port = args.port or state.server.servers[0].sockets[0].getsockname()[1]
    scheme = "https" if args.ssl_keyfile else "http"
    return f"{scheme}://{host}:{port}{path}"


def socket_of(state) -> str | None:
    """The path of a server's socket file; None for a server with a port."""
    return getattr(state.args, "uds", None) or None


def read_http_by(protocol: str) -> None:
    """Set the class that reads HTTP if uvicorn would choose its class for httptools.

    vLLM leaves the choice to uvicorn, and sets the bounds of headers only for h11.
    """
    from importlib.util import find_spec

    from uvicorn.config import HTTP_PROTOCOLS

    if find_spec("httptools"):
        PROTOCOL.apply_to(HTTP_PROTOCOLS, lambda original: protocol)


def refuse_bodies_by(handler: Callable) -> None:
    """Replace the handler of vLLM's app for invalid bodies.

    vLLM sets its handler after plugins have attached their routes.
    """
    replace(BODIES, make=lambda original: handler).apply()


def header_bounds(config) -> tuple[int, int]:
    """The limits of the bytes and the number of headers that vLLM's flags set in uvicorn."""
    return config.h11_max_incomplete_event_size, config.h11_max_header_count


def closed_routes(args) -> dict[str, str]:
    """Routes of every vLLM server that are useless without a flag, and the flag."""
    elastic = getattr(args, "enable_elastic_ep", False)
    return {} if elastic else {"/scale_elastic_ep": "--enable-elastic-ep"}


INVOCATIONS = "/invocations"  # reads its body itself, to detect the kind of request


def adapters_of_invocations(endpoint: Callable) -> list:
    """The pydantic adapters of ``/invocations``, from its closure.

    Raises:
        TypeError: it has none.
    """
    adapters = list(_adapters(endpoint))
    if not adapters:
        raise TypeError(f"{INVOCATIONS} has no adapters")
    return adapters


def _adapters(value) -> Iterator:
    """Adapters in the closure of a function, in lists and in wrapped functions."""
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
    """Add vLLM's routes for trainers with one of the paths."""
    from vllm.entrypoints.rl.online.api_router import router

    app.router.routes += [route for route in router.routes if route.path in paths]
