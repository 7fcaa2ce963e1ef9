"""Flags of vLLM's on a command line, validated and read before vLLM is imported."""

import argparse
import difflib
import re
from collections.abc import Callable, Collection
from pathlib import Path

from attnres_serve.errors import SettingError

CONFIG = "--config"  # names a file of flags
SUFFIXES = {  # that vLLM takes in numbers of tokens and bytes
    **{"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12},
    **{"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40},
}


def usual(word: str) -> str:
    """A flag as it is usually spelt; vLLM takes --max_model_len for --max-model-len."""
    if not word.startswith("--"):
        return word
    # Behind a dot comes a key of what the flag is made of: --hf-overrides.rope_theta.
    name = re.split("[.=]", word, maxsplit=1)[0]
    return name.replace("_", "-") + word[len(name) :]


def given(words: list[str]) -> list[tuple[str, list[str]]]:
    """The flags among words as they are usually spelt, each with the words behind it."""
    found: list[tuple[str, list[str]]] = []
    is_value = False
    for word in words:
        name = word.partition("=")[0]
        if is_value or not re.match("-{1,2}[A-Za-z]", word) or " " in name:  # as argparse has it
            if found:
                found[-1][1].append(word)
            is_value = False
            continue
        flag, equals, value = usual(word).partition("=")
        found.append((flag, [value] if equals else []))
        is_value = "." in word and not equals  # --hf-overrides.key VALUE
    return found


def values_of(flag: str, words: list[str]) -> list[str]:
    """The values that a flag of vLLM's is given; of several the last counts, as for its parser."""
    found = [values for name, values in given(words) if name == flag]
    return found[-1] if found else []


def value_of(flag: str, words: list[str]) -> str | None:
    """The value that a flag of vLLM's is given, None where it is not given."""
    return next(iter(values_of(flag, words)), None)


def number(value: str | None) -> int | None:
    """A number of tokens or bytes as vLLM reads it; None where it is none, or left to vLLM."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", (value or "").strip())
    return int(float(found[1]) * SUFFIXES.get(found[2], 1)) if found else None


def names(add_arguments: Callable[[argparse.ArgumentParser], None]) -> frozenset[str]:
    """The names of the flags that a function adds to a parser."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return frozenset(name for action in parser._actions for name in action.option_strings)


def require_known(
    words: list[str],
    known: Collection[str] | None,
    own: Collection[str] = (),
    choices: Callable[[str], list[str] | None] = lambda flag: None,
) -> None:
    """Refuse a flag that vLLM would refuse, after the seconds that its import takes.

    Abbreviations, which vLLM takes, are refused too: what is validated early would not see them.

    Args:
        words: what is given to vLLM; the file that ``--config`` names is validated as well.
        known: names of vLLM's flags, by ``source.flags_of_server`` or ``flags_of_engine``; None
            where they cannot be told, and nothing is validated.
        own: names of the command's own flags, which a suggestion may name.
        choices: gives the values that a flag takes, None for any, as ``source.choices``.

    Raises:
        SettingError: with one sentence that names the flag and the nearest one there is, or the
            values that it takes.
    """
    if known is None:
        return
    path, from_file = _read_config(words)
    in_file = f" in {path}"
    places = [(flag, values, "") for flag, values in given(words)]
    places += [(flag, values, in_file) for flag, values in given(from_file)]
    for name, values, place in places:
        flag = name.partition(".")[0]
        if not (_is_known(flag, known) or flag == CONFIG):
            there = {*known} if place else {*known, *own}
            raise SettingError(f"found {flag}{place}, {_advice(flag, there)}")
        listed = choices(name) if name.startswith("--") else None
        if listed is not None and (not values or values[0] not in (*listed, "None", "")):
            found = f"{name} {values[0]}{place}" if values else f"{name}{place} without a value"
            raise SettingError(f"found {found}; expected one of {', '.join(listed)}.")


def with_config(words: list[str]) -> list[str]:
    """The words with those of the file that ``--config`` names before them, to be read only.

    Raises:
        SettingError: the file cannot be read.
    """
    return [*_read_config(words)[1], *words]


def _is_known(flag: str, known: Collection[str]) -> bool:
    if flag.startswith("--"):
        return flag in known or flag.replace("--no-", "--", 1) in known
    return flag in known or flag[:2] in known  # -O3, -qawq


def _advice(flag: str, names: Collection[str]) -> str:
    """What to do instead of giving a flag that there is not."""
    no = "--no-" if flag.startswith("--no-") else "--"
    wanted = flag.replace(no, "--", 1)
    longer = sorted(name for name in names if name.startswith(wanted) and len(wanted) > 2)
    turned = [name for name in names if name in _turned(wanted)]
    near = longer[:1] or turned or difflib.get_close_matches(wanted, names, n=1, cutoff=0.75)
    if near:
        if _turned(wanted) and _turned(near[0]) and near[0][:5] != wanted[:5]:
            no = "--" if no == "--no-" else "--no-"
        return f"which is no flag; did you mean {near[0].replace('--', no, 1)}?"
    return "which is no flag; `attnres-serve serve --help=all` lists those there are."


def _turned(flag: str) -> list[str]:
    """The flag that turns on what one turns off, or the other way round; empty for any other."""
    on, off = "--enable-", "--disable-"
    swaps = ((on, off), (off, on))
    return [flag.replace(this, that, 1) for this, that in swaps if flag.startswith(this)]


def _read_config(words: list[str]) -> tuple[str, list[str]]:
    """The path of the file that ``--config`` names and its flags as words; empty without one.

    Raises:
        SettingError: vLLM would fail at the file, or not read it.
    """
    places = [place for place, word in enumerate(words) if word.partition("=")[0] == CONFIG]
    if not places:
        return "", []
    path = (words[places[0] + 1 :] or [""])[0]
    if len(places) > 1 or "=" in words[places[0]] or not path.endswith((".yaml", ".yml")):
        raise SettingError(
            f"found {' '.join(words[places[0] :][:2])}; expected {CONFIG} FILE once, with a space "
            "before the name and a file that ends with .yaml."
        )
    import yaml  # comes with vLLM

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"{CONFIG}: {path} cannot be read ({reason}).") from None
    if not isinstance(content, dict):
        raise SettingError(f"{CONFIG}: {path} holds no flags; expected lines like `port: 8000`.")
    return path, [_word(str(key), value) for key, value in content.items()]


def _word(key: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{key}" if value else f"--no-{key}"
    return f"--{key}={value}"
