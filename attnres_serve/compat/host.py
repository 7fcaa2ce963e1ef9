"""The installed vLLM: its version, its platform and its log.

Read against vLLM 0.28.0 to 0.32.0, see docs/use/versions.md.  vLLM itself is imported inside the
functions, so that a module can be imported, and the version checked, without it.
"""

from logging import Logger

from attnres_serve.compat import start_events

OLDEST, NEWEST = (0, 28), (0, 32)  # minor versions that the tests ran with (docs/use/versions.md)

UNTESTED = (0, 33)  # allowed up to this one: nothing that is used here was announced to go


def unsupported_version() -> str | None:
    """A sentence if the installed vLLM is outside the supported range, else None."""
    try:
        import vllm
    except ImportError as error:
        return (
            f"vLLM cannot be imported ({error}); install it, or attnres-serve with the extra cpu "
            "or cuda."
        )
    if OLDEST <= _minor(vllm.__version__) <= UNTESTED:
        return None
    return (
        f"attnres-serve supports vLLM {_tested()}, found {vllm.__version__}: AttnRes checkpoints "
        "are not available, all other models are."
    )


def untested_version() -> str | None:
    """A sentence if the installed vLLM is allowed but no test was run with it, else None."""
    import vllm

    if _minor(vllm.__version__) <= NEWEST:
        return None
    return (
        f"attnres-serve is tested with vLLM {_tested()} and not with {vllm.__version__}: check "
        "your checkpoint with `attnres-serve verify` before you rely on its answers."
    )


def is_older_than(minor: tuple[int, int]) -> bool:
    """Whether the installed vLLM has a smaller major and minor number."""
    import vllm

    return _minor(vllm.__version__) < minor


def _minor(version: str) -> tuple[int, ...]:
    """Major and minor number; those of the coming release for a candidate or development build."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()


def _tested() -> str:
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


def logger() -> Logger:
    """A logger below vLLM's, the only ones that its logging configuration shows.

    While an engine starts, its warnings are also told to whoever began it.
    """
    from vllm.logger import init_logger

    found = init_logger("vllm.attnres_serve")
    found.addHandler(start_events.WARNINGS)  # anew: a configuration of logging drops it
    return found


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def batch_invariant() -> bool:
    """Whether vLLM was asked that no answer depends on what else is in its batch."""
    from vllm import envs

    return envs.VLLM_BATCH_INVARIANT
