"""``attnres-serve serve``: vLLM's own OpenAI server with our endpoint plugin and safe defaults.

The checkpoint and the port can be validated without vLLM, so they are validated first: a mistake
costs a second, not a minute.
"""

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attnres_serve
from attnres_serve import formats, settings
from attnres_serve.checkpoints import blocks, cache, hub, needs
from attnres_serve.checkpoints.check import served_dtype
from attnres_serve.checkpoints.checked import check_model
from attnres_serve.checkpoints.draft import check_draft
from attnres_serve.compat import compiler, device, openai_server, workers
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.kernels.cpp import library
from attnres_serve.lora import modules
from attnres_serve.model import backend as backend_choice
from attnres_serve.server.bounds import policy
from attnres_serve.server.start import address, facts, levels
from attnres_serve.start import events

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
DEFAULTS: dict[str, Any] = {"host": DEFAULT_HOST, "port": DEFAULT_PORT}
DTYPES = {"half": "float16", "float": "float32"}  # other words of --dtype
# Variables of vLLM's that open what no key and no bound of ours covers, and how.
UNPROTECTED = {
    "VLLM_SERVER_DEV_MODE": "adds routes for development, which run methods in the workers",
    "VLLM_USE_RUST_FRONTEND": "replaces the server by one without our routes and bounds",
    "VLLM_ENABLE_RESPONSES_API_STORE": "keeps answers without end and lets them run on unbounded",
}
# Flags of ours that need a key, and what they open.
KEYED = {
    "enable_weight_updates": "routes that pause the server and replace its model",
    settings.CHANGE_EDITS: "a route that changes what the server computes",
}
# Flags of vLLM's with another default than its own.
SERVER_DEFAULTS: dict[str, Any] = {
    "allowed_origins": [],  # no page of another site
    "h11_max_incomplete_event_size": 2**16,  # bytes of headers; vLLM's is 4 MiB
    "shutdown_timeout": 20,  # seconds for running requests to end after SIGTERM; vLLM's is 0
    "middleware": ["attnres_serve.server.request_ids.RequestIds"],  # --middleware adds to it
}
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that are ours; every other one is vLLM's."""
    settings.add_arguments(parser)
    policy.add_arguments(parser)
    parser.add_argument(
        "--verbose",
        action=argparse.BooleanOptionalAction,
        help="show vLLM's whole log, not its warnings alone",
    )


def serve(arguments: Arguments) -> None:
    """Serve a checkpoint until the server is stopped.

    Args:
        arguments: of the server, ours and vLLM's.  The model is a folder or a Hugging Face model
            id, None for the demo of a source checkout.

    Raises:
        CheckpointError, SettingError: with one sentence, before anything is started.
    """
    check_environment()
    given = arguments.given
    keys = policy.read_keys(given["api_key_file"]) if "api_key_file" in given else []
    check_closed(arguments, keys)
    own = settings.given(given)
    settings.shard_tokens(own)
    name = bundled_demo() if arguments.model is None else arguments.model
    model, kept, dtype = check_checkpoint(name, arguments)
    chosen = {"kv_cache_memory_bytes": kept.size} if kept and kept.is_chosen else {}
    backend_choice.require(own.get(settings.BACKEND_KEY))
    compiler.require(arguments)
    if (cores := workers.bind(arguments)) is not None:
        events.tell("model", facts={"cores": f"{cores}, a part for each worker"})
    if arguments.uds:
        address.clear_socket(arguments.uds)
    else:
        if "host" in given and not arguments.host:
            raise SettingError(
                "found --host without an address, with which every network reaches the server; "
                "give 0.0.0.0 for that."
            )
        place = {name: getattr(arguments, name) for name in DEFAULTS if arguments.has(name)}
        address.check_port(**{**DEFAULTS, **place})
    os.environ["VLLM_PLUGINS"] = allowed_plugins(os.environ.get("VLLM_PLUGINS"))
    given_key = arguments.has("api_key")
    if not (keys or given_key or os.environ.get("VLLM_API_KEY", "key").strip()):
        raise SettingError("VLLM_API_KEY is set and empty; give it a key or unset it.")
    has_key = keys or given_key or os.environ.get("VLLM_API_KEY")
    for flag, opens in KEYED.items():
        if given.get(flag) and not has_key:
            raise SettingError(
                f"--{flag.replace('_', '-')} opens {opens}, and there is no API key; set "
                "VLLM_API_KEY, or give --api-key-file."
            )
    if device.is_cpu() and own.get(settings.BACKEND_KEY) != "torch":
        library.compile_ahead(dtype)  # beside all that is imported from here on
    check_plugin()
    flags = [name for name, value in given.items() if value is not False]
    log = levels.wants_log(flags, os.environ)
    events.tell(
        "checked",
        title=facts.title(),
        log=log,
        headless=arguments.headless,
        socket=arguments.uds,
    )
    if given_key and "api_key" not in arguments.places:
        events.tell(
            "warning",
            text="whoever can list processes reads the key after --api-key; put it into "
            "VLLM_API_KEY, or into a file for --api-key-file.",
        )
    if not log:
        os.environ[levels.LEVEL] = levels.QUIET  # in every process
    if given.get("enable_weight_updates"):
        chosen |= openai_server.weight_transfer(arguments.words)
    openai_server.run_server(
        model,
        DEFAULTS
        | SERVER_DEFAULTS
        | chosen
        | {"served_model_name": names(arguments.model, model, arguments)},
        [*arguments.words],
        own,
        keys,
        policy.given(given),
    )


def check_environment() -> None:
    """Raise SettingError if a variable of vLLM's would open what is closed here."""
    for name, does in UNPROTECTED.items():
        if os.environ.get(name, "0") not in ("", "0"):
            raise SettingError(f"{name} is set, which {does}; unset it or run vLLM's own command.")


def check_closed(arguments: Arguments, keys: Sequence[str]) -> None:
    """Raise SettingError if a flag would open what the keys of a file, or of flags, close."""
    if arguments.given.get("grpc"):
        raise SettingError(
            "found --grpc; its server has neither our routes nor the API key, so leave it out or "
            "run vLLM's own command."
        )
    if not all(key and key.strip() for key in arguments.api_key or ()):
        raise SettingError("found an empty --api-key, with which the server is open; leave it out.")
    if keys and arguments.api_key:
        raise SettingError("found --api-key beside --api-key-file; give one of them.")


def check_plugin() -> None:
    """Raise SettingError if vLLM could not load our endpoint plugin; it would serve without it."""
    try:
        points = entry_points(group="vllm.endpoint_plugins", name="attnres")
        if not points:
            raise ImportError("no entry point of vllm.endpoint_plugins is called attnres")
        for point in points:
            point.load()
    except Exception as error:
        raise SettingError(
            "the routes of attnres-serve, and with them keys and bounds, cannot be loaded "
            f"({type(error).__name__}: {error}); install it anew with `pip install attnres-serve`."
        ) from None


def bundled_demo() -> str:
    """The demo checkpoint, which a source checkout has and a wheel has not."""
    folder = Path(attnres_serve.__file__).parents[1] / "examples" / "demo" / "checkpoint"
    if not folder.is_dir():
        raise CheckpointError(
            "no checkpoint was named, and the demo is only in a source checkout; give the path of "
            "a checkpoint folder right after `serve`."
        )
    return str(folder)


def check_checkpoint(
    name: str, arguments: Arguments | None = None
) -> tuple[str, cache.Cache | None, str]:
    """Validate a checkpoint by its files.

    Args:
        name: a folder, or a Hugging Face model id.
        arguments: of vLLM.  ``revision`` is that of a model id; with the load format ``dummy`` no
            weights are read, and config.json alone must fit.

    Returns:
        The name to pass to vLLM as the model, the cache that it will have on a CPU, and the dtype
        of its activations.

    Raises:
        CheckpointError: it cannot be served as its config.json describes, or lacks what it needs.
        SettingError: a flag asks of it what it cannot do.
    """
    arguments = arguments or Arguments()
    found = check_model(name, arguments.revision, arguments.load_format != "dummy")
    folder = hub.local_path(name)
    parsed = found.translated(name)
    needs.check(name, parsed, folder, arguments)
    blocks.check(name, parsed, arguments)
    check_draft(name, found, arguments)
    if formats.own_layer_names(parsed.format) is None:  # others take no adapters
        needed = found.index.base.needed if found.index else {}
        modules.check(arguments, needed, found.has_table)
    settings.require_edits(settings.given(arguments.given), parsed.spec)
    kept = cache.of(name, parsed, arguments)
    events.tell("model", facts=facts.of_checkpoint(name, parsed, kept))
    asked = arguments.dtype
    dtype = served_dtype(found.config, [*found.headers.values()])
    return str(folder or name), kept, dtype if asked == "auto" else DTYPES.get(asked, asked)


def names(checkpoint: str | None, model: str, arguments: Arguments) -> list[str]:
    """The names of the served model where no flag gives any: its folder's, and its path's.

    Args:
        checkpoint: as it was given; None for the demo.
        model: what vLLM is given.
        arguments: of vLLM, among which adapters may have the folder's name.
    """
    given = [model] if checkpoint is None else [checkpoint, model]
    first = "demo" if checkpoint is None else os.path.basename(os.path.abspath(model))
    adapters = {module["name"] for module in arguments.lora_modules}
    is_folder = hub.local_path(given[0]) is not None
    if not first or not is_folder or first in adapters:
        return list(dict.fromkeys(given))
    return list(dict.fromkeys([first, *given]))


def allowed_plugins(current: str | None) -> str:
    """The value of VLLM_PLUGINS with our endpoint plugin in it.

    vLLM loads endpoint plugins only if they are named there, and the variable then filters every
    other plugin group too, so whatever is installed in those stays named.
    """
    if current is not None:
        names = [name for name in current.split(",") if name]
    else:
        names = [point.name for group in PLUGIN_GROUPS for point in entry_points(group=group)]
    return ",".join(dict.fromkeys([*names, "attnres"]))
