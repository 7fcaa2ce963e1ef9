"""How much of vLLM's log is shown: warnings and errors, unless somebody asks for all of it."""

from collections.abc import Iterable, Mapping

LEVEL = "VLLM_LOGGING_LEVEL"
QUIET = "WARNING"
COLOUR = "VLLM_LOGGING_COLOR"  # asks for no more than its name
# Flags and variables by which somebody asks for vLLM's log.
FLAGS = ("verbose", "log_", "logging_config", "uvicorn_log_", "enable_log")
VARIABLES = ("VLLM_LOG_", "VLLM_LOGGING_", "VLLM_CONFIGURE_LOGGING", "VLLM_TRACE_FUNCTION")


def wants_log(flags: Iterable[str], environment: Mapping[str, str]) -> bool:
    """True if a command line or the environment asks for vLLM's whole log.

    Args:
        flags: those that are given, in any spelling.
        environment: its variables.
    """
    return any(flag.lstrip("-").replace("-", "_").startswith(FLAGS) for flag in flags) or any(
        name.startswith(VARIABLES) and name != COLOUR for name in environment
    )
