"""Machine code of sm_90 as the model needs it: what each instruction waits for.

Nothing about registers is guessed.  Since Volta the compiler writes into every instruction how many
cycles its warp stalls after it, which of six scoreboards it waits for, and which one its result or
the reading of its operands releases (Jia et al., "Dissecting the NVIDIA Volta GPU architecture via
microbenchmarking", arXiv 1804.06826, section 2).
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import triton

LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);\s*/\* 0x[0-9a-f]{16} \*/"
    r"\s*/\* 0x([0-9a-f]{16}) \*/"
)
NONE = 7  # the scoreboard of an instruction that has none


class Instruction(NamedTuple):
    """One instruction; what follows ``target`` is the compiler's scheduling."""

    address: int
    predicated: bool
    name: str
    target: int | None  # of a branch
    stall: int
    wait: int  # a bit for each scoreboard
    releases: int  # the scoreboard that its result releases
    frees: int  # the scoreboard that is released when its operands are read
    left: int | None = None  # of a wait for copies: how many groups may be under way behind it

    @property
    def opcode(self) -> str:
        return self.name.partition(".")[0]

    @property
    def bytes(self) -> int:
        """Of an access, by one thread."""
        width = re.search(r"\.(128|64|U16|U8)\b", self.name)
        return {"128": 16, "64": 8, "U16": 2, "U8": 1}[width[1]] if width else 4


def disassemble(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin with one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", path]
        return parse(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def parse(dump: str) -> list[Instruction]:
    """The instructions of what ``cuobjdump --dump-sass`` prints."""
    found = []
    for address, predicate, name, operands, high in LINE.findall(dump):
        word = int(high, 16)
        target = re.search(r"0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        left = re.search(r"SB\d, 0x([0-9a-f]+)", operands) if name == "DEPBAR.LE" else None
        found.append(
            Instruction(
                int(address, 16),
                bool(predicate),
                name,
                int(target[1], 16) if target else None,
                stall=word >> 41 & 15,
                releases=word >> 46 & 7,
                frees=word >> 49 & 7,
                wait=word >> 52 & 63,
                left=int(left[1], 16) if left else None,
            )
        )
    return found


def loops(code: Sequence[Instruction]) -> list[int]:
    """Addresses where loops begin, in order; the endless one behind the code is none."""
    jumps = {one.target for one in code if one.target is not None and one.target < one.address}
    return sorted(jumps)


def lengths(code: Sequence[Instruction]) -> list[int]:
    """Instructions of each of the ``loops``, with those of loops inside of it."""
    ends = {one.target: one.address for one in code if one.target is not None}
    return [sum(head <= one.address <= ends[head] for one in code) for head in loops(code)]


def path(code: Sequence[Instruction], rounds: Sequence[int | None]) -> list[Instruction]:
    """What every warp executes, in order.

    A branch back to a loop's begin is taken until the loop has its rounds; one that all threads
    take ends the kernel after the last of them.  A branch forward is taken if all threads take it,
    if it skips a barrier and no loop, as what is summed only there is rare (a merge whose sources
    cancel), or if it is the last one that skips a loop of no rounds.  An exit in front of such a
    loop skips it as well.

    Args:
        code: a kernel's instructions.
        rounds: of each of its ``loops``, every time that it is entered; None if the first branch
            that skips it is taken, with all that is around it.

    Raises:
        ValueError: the kernel has another number of loops.
    """
    heads = loops(code)
    if len(heads) != len(rounds):
        raise ValueError(f"the code has {len(heads)} loops, not {len(rounds)}")
    wanted = dict(zip(heads, rounds, strict=True))
    index = {one.address: i for i, one in enumerate(code)}

    def forward(one: Instruction) -> bool:
        """Whether a branch forward is taken."""
        if not one.predicated:
            return True
        inside = [head for head in heads if one.address < head < one.target]
        if not inside:
            return "BAR" in (i.opcode for i in code if one.address < i.address < one.target)
        for head in inside:
            if not wanted[head]:
                nearer = (
                    i for i in code if one.address < i.address < head and i.target is not None
                )
                if wanted[head] is None or not any(i.target > head for i in nearer):
                    return True
        return False

    left: dict[int, int] = {}
    taken: list[Instruction] = []
    at = 0
    while True:
        one = code[at]
        taken.append(one)
        at += 1
        if one.opcode == "EXIT":
            ahead = next((head for head in heads if head > one.address), None)
            if not one.predicated or (ahead is not None and not wanted[ahead]):
                return taken
        elif one.target is None:
            continue
        elif one.target < one.address:
            rest = left.pop(one.address, (wanted[one.target] or 0) - 1)
            if rest > 0:
                left[one.address] = rest - 1
                at = index[one.target]
            elif not one.predicated:
                return taken
        elif forward(one):
            at = index[one.target]
