"""The level of vLLM's log: warnings and errors, unless a flag or a variable requests more."""

from collections.abc import Iterable, Mapping

LEVEL = "VLLM_LOGGING_LEVEL"
QUIET = "WARNING"
COLOUR = "VLLM_LOGGING_COLOR"  # it requests only colours
# Beginnings of flags and variables that request vLLM's log.
FLAGS = ("verbose", "log_", "logging_config", "uvicorn_log_", "enable_log")
VARIABLES = ("VLLM_LOG_", "VLLM_LOGGING_", "VLLM_CONFIGURE_LOGGING", "VLLM_TRACE_FUNCTION")


def wants_log(flags: Iterable[str], environment: Mapping[str, str]) -> bool:
    """Whether a command line or the environment requests vLLM's whole log.

    Args:
        flags: the flags of the command line, in any spelling.
        environment: the environment variables.
    """
    return any(flag.lstrip("-").replace("-", "_").startswith(FLAGS) for flag in flags) or any(
        name.startswith(VARIABLES) and name != COLOUR for name in environment
    )
