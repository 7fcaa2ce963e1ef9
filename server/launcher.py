"""``attnres-serve serve``: vLLM's OpenAI server with the endpoint plugin and safe defaults.

The checkpoint and the port are validated first, without vLLM: a mistake costs a second instead of
a minute.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attnres_serve
from attnres_serve import formats, settings
from attnres_serve.checkpoints import adapter_tables, blocks, cache, hub, needs
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
DTYPES = {"half": "float16", "float": "float32"}  # aliases of --dtype
# Variables of vLLM that add something without keys and bounds, and what they do.
UNPROTECTED = {
    "VLLM_SERVER_DEV_MODE": "adds routes for development, which run methods in the workers",
    "VLLM_USE_RUST_FRONTEND": "replaces the server by one without our routes and bounds",
    "VLLM_ENABLE_RESPONSES_API_STORE": "keeps answers without end and lets them run on unbounded",
}
# Flags of attnres-serve that need a key, and what they open.
KEYED = {
    "enable_weight_updates": "routes that pause the server and replace its model",
    settings.CHANGE_EDITS: "a route that changes what the server computes",
}
# Flags of vLLM with another default.
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
    """Add the flags of attnres-serve; all others are vLLM's."""
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
        arguments: all arguments of the server.  The model is a folder or a Hugging Face model id;
            None for the demo of a source checkout.

    Raises:
        CheckpointError, SettingError: the message is one sentence; nothing was started.
    """
    check_environment()
    flags = arguments.values
    keys = policy.read_keys(flags["api_key_file"]) if "api_key_file" in flags else []
    check_closed(arguments, keys)
    additional_config = settings.from_flags(flags)
    settings.shard_tokens(additional_config)
    name = bundled_demo() if arguments.model is None else arguments.model
    model, kv_cache, dtype = check_checkpoint(name, arguments)
    chosen = {}
    if kv_cache and kv_cache.is_chosen:
        chosen["kv_cache_memory_bytes"] = kv_cache.size
    backend_choice.require(additional_config.get(settings.BACKEND_KEY))
    compiler.require(arguments)
    if (cores := workers.bind(arguments)) is not None:
        events.tell("model", facts={"cores": f"{cores}, a part for each worker"})
    if arguments.uds:
        address.clear_socket(arguments.uds)
    else:
        if "host" in flags and not arguments.host:
            raise SettingError(
                "found --host without an address, with which every network reaches the server; "
                "give 0.0.0.0 for that."
            )
        place = {name: getattr(arguments, name) for name in DEFAULTS if arguments.has(name)}
        address.check_port(**{**DEFAULTS, **place})
        if arguments.port == 0 and (arguments.api_server_count or arguments.data_parallel_size) > 1:
            raise SettingError(
                "--port 0 has the system choose a port, and several API servers cannot report "
                "which; give a port, or --api-server-count 1."
            )
    os.environ["VLLM_PLUGINS"] = allowed_plugins(os.environ.get("VLLM_PLUGINS"))
    has_key_flag = arguments.has("api_key")
    if not (keys or has_key_flag or os.environ.get("VLLM_API_KEY", "key").strip()):
        raise SettingError("VLLM_API_KEY is set and empty; give it a key or unset it.")
    has_key = keys or has_key_flag or os.environ.get("VLLM_API_KEY")
    for flag, opens in KEYED.items():
        if flags.get(flag) and not has_key:
            raise SettingError(
                f"--{flag.replace('_', '-')} opens {opens}, and there is no API key; set "
                "VLLM_API_KEY, or give --api-key-file."
            )
    if device.is_cpu() and additional_config.get(settings.BACKEND_KEY) != "torch":
        library.compile_ahead(dtype)  # while everything else is imported
    check_plugin()
    enabled = [name for name, value in flags.items() if value is not False]
    log = levels.wants_log(enabled, os.environ)
    events.tell(
        "checked",
        title=facts.title(),
        log=log,
        headless=arguments.headless,
        socket=arguments.uds,
    )
    if has_key_flag and "api_key" not in arguments.places:
        events.tell(
            "warning",
            text="whoever can list processes reads the key after --api-key; put it into "
            "VLLM_API_KEY, or into a file for --api-key-file.",
        )
    if not log:
        os.environ[levels.LEVEL] = levels.QUIET  # in every process
    if flags.get("enable_weight_updates"):
        chosen |= openai_server.weight_transfer(arguments.vllm_argv)
    openai_server.run_server(
        model,
        DEFAULTS
        | SERVER_DEFAULTS
        | chosen
        | {"served_model_name": names(arguments.model, model, arguments)},
        [*arguments.vllm_argv],
        additional_config,
        keys,
        policy.from_flags(flags),
    )


def check_environment() -> None:
    """Raise SettingError if a variable of vLLM would open something without keys and bounds."""
    for name, does in UNPROTECTED.items():
        if os.environ.get(name, "0") not in ("", "0"):
            raise SettingError(f"{name} is set, which {does}; unset it or run vLLM's own command.")


def check_closed(arguments: Arguments, keys: Sequence[str]) -> None:
    """Raise SettingError if a flag would open a server that has API keys."""
    if arguments.values.get("grpc"):
        raise SettingError(
            "found --grpc; its server has neither our routes nor the API key, so leave it out or "
            "run vLLM's own command."
        )
    if not all(key and key.strip() for key in arguments.api_key or ()):
        raise SettingError("found an empty --api-key, with which the server is open; leave it out.")
    if keys and arguments.api_key:
        raise SettingError("found --api-key beside --api-key-file; give one of them.")


def check_plugin() -> None:
    """Raise SettingError if the endpoint plugin cannot be loaded; vLLM would serve without it."""
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
    """The demo checkpoint, which only a source checkout has."""
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
    """Validate a checkpoint's files.

    Args:
        name: a folder, or a Hugging Face model id.
        arguments: vLLM's arguments.  ``revision`` is that of a model id; with the load format
            ``dummy`` only config.json is validated.

    Returns:
        The name to pass to vLLM as the model, its KV cache on a CPU, and the dtype of its
        activations.

    Raises:
        CheckpointError: it cannot be served as its config.json describes, or a requirement is
            missing.
        SettingError: the model does not support a flag.
    """
    arguments = arguments or Arguments()
    checkpoint = check_model(name, arguments.revision, arguments.load_format != "dummy")
    folder = hub.local_path(name)
    parsed = checkpoint.translated(name)
    needs.check(name, parsed, folder, arguments)
    blocks.check(name, parsed, arguments)
    check_draft(name, checkpoint, arguments)
    if formats.by_name(parsed.format).layer_names_of is None:  # other formats take no adapters
        needed = checkpoint.index.base.needed if checkpoint.index else {}
        modules.check(arguments, needed, partial(adapter_tables.has_table, checkpoint))
    settings.require_edits(settings.from_flags(arguments.values), parsed.spec)
    kv_cache = cache.of(name, parsed, arguments)
    events.tell("model", facts=facts.of_checkpoint(name, parsed, kv_cache))
    dtype = arguments.dtype
    if dtype == "auto":
        dtype = served_dtype(checkpoint.config, [*checkpoint.headers.values()])
    return str(folder or name), kv_cache, DTYPES.get(dtype, dtype)


def names(checkpoint: str | None, model: str, arguments: Arguments) -> list[str]:
    """The default names of the served model: the folder's name, and the path.

    Args:
        checkpoint: the user's argument; None for the demo.
        model: the argument for vLLM.
        arguments: vLLM's arguments; one of its adapters may have the folder's name.
    """
    paths = [model] if checkpoint is None else [checkpoint, model]
    first = "demo" if checkpoint is None else os.path.basename(os.path.abspath(model))
    adapters = {module["name"] for module in arguments.lora_modules}
    is_folder = hub.local_path(paths[0]) is not None
    if not first or not is_folder or first in adapters:
        return list(dict.fromkeys(paths))
    return list(dict.fromkeys([first, *paths]))


def allowed_plugins(current: str | None) -> str:
    """The value of VLLM_PLUGINS with the endpoint plugin in it.

    vLLM loads endpoint plugins only if the variable names them.  The variable then filters every
    other plugin group too, so it has to name their installed plugins.
    """
    if current is not None:
        names = [name for name in current.split(",") if name]
    else:
        names = [point.name for group in PLUGIN_GROUPS for point in entry_points(group=group)]
    return ",".join(dict.fromkeys([*names, "attnres"]))
