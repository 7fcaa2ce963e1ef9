"""Settings of ours inside vLLM's ``additional_config``, and so inside its compile-cache key."""

from typing import Any

from attnres_serve.errors import SettingError

ALGORITHM_KEY = "attnres_algorithm"
ALGORITHMS = ("single_pass", "two_phase")
CHOICES = (*ALGORITHMS, "auto")
PREFIX = "attnres_"


def algorithm(additional_config: Any) -> str:
    """The algorithm to run, from vLLM's ``additional_config``.

    ``auto`` is single_pass, the faster one in decode on CPU (docs/performance.md).

    Raises:
        SettingError: for an unknown value, or an unknown key that begins with ``attnres_``.
    """
    settings = additional_config if isinstance(additional_config, dict) else {}
    for key in settings:
        if key.startswith(PREFIX) and key != ALGORITHM_KEY:
            raise SettingError(
                f"--additional-config has the unknown key {key!r}; the known one is "
                f"{ALGORITHM_KEY!r}."
            )
    choice = settings.get(ALGORITHM_KEY, "auto")
    if choice not in CHOICES:
        raise SettingError(f"{ALGORITHM_KEY} is {choice!r}; expected one of {', '.join(CHOICES)}.")
    return "single_pass" if choice == "auto" else choice


# Methods that propose tokens without looking inside the target model.
SPECULATION = ("ngram",)
