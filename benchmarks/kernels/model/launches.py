"""The launches that the model knows: compiled ahead of time, executed by one SM, timed.

A launch is a kernel at a hidden size.  How many rounds its loops have and how many bytes it moves
follow from rows, sites and tokens; bytes are those of ``kernels/traffic.py``.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from attnres_serve.kernels import traffic
from attnres_serve.kernels.triton import common, open_group, score_rows
from benchmarks.kernels import compile_ahead
from benchmarks.kernels.model import issue, machine, sass
from benchmarks.kernels.model.machine import Gpu

DTYPE = torch.bfloat16
ARCH = 90


class Binary(NamedTuple):
    """A kernel as it was compiled."""

    code: list[sass.Instruction]
    warps: int
    resident: int  # programs that fit on an SM
    registers: int
    config: dict[str, int]

    @classmethod
    def of(cls, compiled: Any, config: dict[str, int]) -> "Binary":
        found = compile_ahead.measure(compiled)
        code = sass.disassemble(compiled.asm["cubin"])
        warps = compiled.metadata.num_warps
        return cls(code, warps, found["programs_per_sm"], found["registers"], config)


@cache
def binary(kernel: str, hidden: int, fresh: bool = False, config: Any = None) -> Binary:
    """A kernel of ours; ``config`` in place of its table."""
    arguments = list(compile_ahead.launches(kernel, hidden, DTYPE, fresh, config))[1]
    arguments |= common.launch_options(True)
    source, target, options = compile_ahead.specialise(
        compile_ahead.KERNELS[kernel], arguments, ARCH
    )
    names = ("TILE", "SITES", "num_warps")
    chosen = {name: arguments[name] for name in names if name in arguments}
    return Binary.of(triton.compile(source, target=target, options=options), chosen)


class Launch(NamedTuple):
    """One launch over ``rows`` finished rows for ``sites`` sites."""

    kernel: str
    hidden: int
    rows: int
    sites: int = 1
    fresh: bool = False
    config: Any = None

    def binary(self) -> Binary:
        return binary(self.kernel, self.hidden, self.fresh, self.config)

    def bytes(self, tokens: int) -> int:
        """What it reads and writes, each address once."""
        shape = self.hidden, DTYPE
        fresh = {"fresh": self.fresh}
        counts: dict[str, Callable[[], int]] = {
            "single_pass": lambda: traffic.single_pass(tokens, self.rows, *shape, **fresh),
            "open_group": lambda: (
                traffic.add_to_row(tokens, *shape, **fresh)
                if not self.sites
                else traffic.open_group(
                    tokens, self.rows, self.sites, *shape, **fresh, added=self.turns(tokens) > 1
                )
            ),
            "merge": lambda: traffic.merge(tokens, *shape, **fresh),
            "score": lambda: traffic.score_rows(tokens, self.rows, self.sites, *shape),
            "mix_scored": lambda: traffic.mix_scored(tokens, self.rows, *shape, **fresh),
        }
        return counts[self.kernel]()

    def turns(self, tokens: int) -> int:
        """Programs of a token."""
        if self.kernel != "open_group" or not self.sites:
            return 1
        return open_group.turns_of(tokens, self.sites, self.hidden, self.config)

    def rounds(self, tokens: int) -> list[list[int | None]]:
        """Of each loop, for every kind of program that the launch has."""
        config = self.binary().config
        if self.kernel == "open_group":
            # The first turn, the later ones, and in those the row that the first completes.  In a
            # program of a later turn, the little that adding to a row takes is counted as well.
            if not self.sites:
                return [[None, 0, 0]]
            if self.turns(tokens) > 1:
                return [[self.rows, 0, 0], [None, 1, self.rows + 1]]
            return [[self.rows, -(-self.sites // config["SITES"]) - 1, self.rows + 1]]
        if self.kernel == "score":
            return [[self.span(tokens)]]
        if self.kernel == "merge":
            return [[]]
        return [[-(-self.rows // config["TILE"])]]

    def span(self, tokens: int) -> int:
        """Tokens of a program."""
        if self.kernel != "score":
            return 1
        groups = -(-self.sites // self.binary().config["SITES"])
        return -(-tokens * groups // score_rows.SCORE_PROGRAMS)

    def programs(self, tokens: int) -> int:
        if self.kernel != "score":
            return tokens * self.turns(tokens)
        groups = -(-self.sites // self.binary().config["SITES"])
        return groups * -(-tokens // self.span(tokens)) * self.rows

    def works(self, tokens: int, from_l2: bool) -> list[issue.Work]:
        """What each kind of program executes; ``from_l2``: everything that it reads is in L2."""
        found = self.binary()
        heads = sass.loops(found.code)
        # Turns that follow one another find the rows in L2.
        in_turn = self.kernel == "open_group" and self.turns(tokens) == 1
        again = heads[1] if in_turn else found.code[-1].address
        each = (self.bytes(2 * tokens) - self.bytes(tokens)) / tokens  # without what is read once
        unique = 0.0 if from_l2 else each * tokens / self.programs(tokens)
        made = []
        for rounds in self.rounds(tokens):
            path = sass.path(found.code, rounds)
            cold = [not from_l2 and (one.address < again or one.opcode == "STG") for one in path]
            made.append(issue.Work.of(path, found.warps, unique, cold))
        return made

    def seconds(self, tokens: int, gpu: Gpu, from_l2: bool = False) -> float:
        """Of the launch, by the model."""
        return _seconds(self, tokens, gpu, from_l2)


@cache
def _seconds(launch: Launch, tokens: int, gpu: Gpu, from_l2: bool) -> float:
    programs, resident = launch.programs(tokens), launch.binary().resident
    works = launch.works(tokens, from_l2)
    # Of several kinds the longest is taken for all.
    longest = max(seconds_of(work, programs, resident, gpu) for work in works)
    before = 0.0
    if launch.turns(tokens) > 1:
        before = launch._replace(sites=0).seconds(tokens, gpu, from_l2)
    return before + machine.LAUNCH + longest


def seconds_of(work: issue.Work, programs: int, resident: int, gpu: Gpu) -> float:
    """Until the SM that has the most programs has executed them."""
    most = -(-programs // gpu.sms)
    clock = gpu.clock if most > 1 else gpu.idle_clock
    share = gpu.memory / clock / min(programs, gpu.sms)
    if most <= 6 * resident:
        return issue.cycles(work, most, resident, share) / clock
    # Beyond that all rounds are alike.
    few, more = (issue.cycles(work, times * resident, resident, share) for times in (3, 6))
    return (more + (more - few) * (most - 6 * resident) / (3 * resident)) / clock


class Part(NamedTuple):
    """So many equal launches."""

    times: int
    launch: Launch


def single_pass(hidden: int, rows: int, sites: int, **configs: Any) -> list[Part]:
    """The launches of a block of sites on ``rows`` rows, of which the first site completes one."""
    config = configs.get("single_pass")
    return _block("single_pass", hidden, rows, sites, config)


def two_phase(hidden: int, rows: int, sites: int, **configs: Any) -> list[Part]:
    """As ``single_pass``, by ``open_group`` and merges."""
    opens = Launch("open_group", hidden, rows - 1, sites, config=configs.get("open_group"))
    _, *later = _block("merge", hidden, rows, sites, configs.get("single_pass"))
    return [Part(1, opens), *later]


def score_on_write(hidden: int, rows: int, sites: int, **configs: Any) -> list[Part]:
    """As ``single_pass``, by ``mix_scored``; the completed row is scored for the later sites."""
    first, *later = _block("mix_scored", hidden, rows, sites, configs.get("single_pass"))
    return [first, Part(1, Launch("score", hidden, 1, sites - 1)), *later]


def _block(kernel: str, hidden: int, rows: int, sites: int, config: Any) -> list[Part]:
    """The second site begins the partial sum."""
    return [
        Part(1, Launch(kernel, hidden, rows - 1, config=config)),
        Part(1, Launch(kernel, hidden, rows, fresh=True, config=config)),
        Part(sites - 2, Launch(kernel, hidden, rows, config=config)),
    ]


ALGORITHMS = {
    "single_pass": single_pass,
    "two_phase": two_phase,
    "score_on_write": score_on_write,
}


def seconds(parts: Sequence[Part], tokens: int, gpu: Gpu, from_l2: bool = False) -> float:
    """Of launches one after the other."""
    return sum(part.times * part.launch.seconds(tokens, gpu, from_l2) for part in parts)
