"""Faults of vLLM and torch, each shown by a call of what a workaround replaces.

NAME.py is about ``attnres_serve/compat/workarounds/NAME.py``.  Its ``fault()`` returns True while
the installed library is wrong.  Where a CPU cannot show that in seconds, a sentence of ``CANNOT``
says why.  ``python -m tests.compat.faults`` prints all of them.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from attnres_serve.compat import patches
from attnres_serve.compat.patch import Missing, place

FOLDER = Path(__file__).parent
CANNOT = {
    "changing_edits": "nothing is wrong: vLLM knows no edits that a version could say.",
    "compile_paths": "each try takes a compiler and a folder: test_compile_paths.py has them.",
    "forked_processes": "vLLM is slower and not wrong: its engines on CPU import vLLM anew.",
    "ids_without_row": "each needs an engine: test_request_refusals.py has a stand-in of one.",
    "openai_app": "each needs a server that runs: tests/server shows them there.",
    "orphans": "several processes are needed, and the time in which one of them does not end.",
    "python_frames": "CPython maps memory at a depth that all frames of a running engine decide.",
    "registry": "nothing is wrong: vLLM does not know our architectures.",
    "replaced_weights": "a model is needed that an engine has loaded, with packed experts.",
    "replacing_calls": "an engine is needed that has answered, and then gets other weights.",
    "request_refusals": "each would end an engine: test_request_refusals.py has a stand-in.",
    "token_counts": "nothing is wrong: vLLM counts no tokens for an access line.",
}


@dataclass(frozen=True)
class Tried:
    """Whether a workaround is due for a library, and the fault there without and within it."""

    library: str
    due: bool
    without: bool
    within: bool

    def problem(self, name: str) -> str | None:
        """What is to be changed in the file of this name, in one sentence; None if nothing is."""
        file = f"workarounds/{name}.py"
        if self.due and not self.without:
            return f"{self.library} has mended this: end the range of {file} before it"
        if self.without and not self.due:
            return f"{self.library} has this fault again: extend the range of {file} to it"
        if self.within:
            return f"{file} does not mend {self.library}"
        return None


def names() -> list[str]:
    """The files that state patches, without their endings."""
    return [*_STATED]


def reason(name: str) -> str | None:
    """Why a CPU cannot show a fault; None where it can."""
    return CANNOT.get(name)


def is_tried(name: str) -> bool:
    """Whether a fault is looked for: also after its last version, and not before its first one.

    What a library was like before is not what a fault asks.
    """
    return any(patch.is_due() or patch.last is not None for patch in _STATED[name])


def missing(name: str) -> list[str]:
    """The targets that the installed library lacks, of patches that are for its version."""
    due = [patch for patch in _STATED[name] if patch.is_due() and not patch.of]
    return [target for patch in due for target in patch.targets if not _is_there(target)]


def try_out(name: str) -> Tried:
    """Look for a fault without and with its workaround, which stays applied in this process."""
    fault, stated = _module(name).fault, _STATED[name]
    without = fault()
    apply(name)
    within = fault()
    library = import_module(stated[0].library)
    title = {"vllm": "vLLM"}.get(library.__name__, library.__name__)
    due = any(patch.is_due() for patch in stated)
    return Tried(f"{title} {library.__version__}", due, without, within)


def apply(name: str) -> None:
    for patch in _STATED[name]:
        if not patch.of:  # of one object, which a fault has no more of
            patch.apply()


def _module(name: str) -> ModuleType:
    return import_module(f"{__name__}.{name}")


def _is_there(target: str) -> bool:
    try:
        place(target)
    except Missing:
        return False
    return True


_STATED = {key.rpartition(".")[2]: value for key, value in patches.table().items()}
