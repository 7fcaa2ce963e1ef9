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
def binary(
    kernel: str, hidden: int, fresh: bool = False, config: Any = None, many: bool = False
) -> Binary:
    """A kernel of ours; ``config`` in place of its table, ``many``: for 17 to 32 sites."""
    arguments = list(compile_ahead.launches(kernel, hidden, DTYPE, fresh, config))[3 if many else 1]
    arguments |= common.launch_options(True)
    source, target, options = compile_ahead.specialise(
        compile_ahead.KERNELS[kernel], arguments, ARCH
    )
    names = ("TILE", "SITES", "TOKENS", "CHUNK", "num_warps")
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
        many = self.kernel in ("score_group", "weigh_group") and self.sites > 16
        return binary(self.kernel, self.hidden, self.fresh, self.config, many)

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
            "score_group": lambda: traffic.score_group(
                tokens, self.rows, self.sites, *shape, **fresh
            ),
            "weigh_group": lambda: traffic.weigh_group(
                tokens, self.rows, self.sites, completes=True
            ),
            "mix_group": lambda: traffic.mix_group(
                tokens, self.rows, self.sites, *shape, completes=True
            ),
        }
        return counts[self.kernel]()

    def turns(self, tokens: int) -> int:
        """Programs of a token."""
        if self.kernel != "open_group" or not self.sites:
            return 1
        return open_group.turns_of(tokens, self.sites, self.hidden, self.config)

    def groups(self) -> int:
        """Of so many sites as a program takes."""
        sites = self.sites - (self.kernel == "mix_group")  # the first has a program of its own
        return -(-sites // self.binary().config["SITES"])

    def rounds(self, tokens: int) -> list[list[int | None]]:
        """Of each loop, for every kind of program that the launch has."""
        found = self.binary()
        if self.kernel == "open_group":
            # The first turn, the later ones, and in those the row that the first completes.  In a
            # program of a later turn, the little that adding to a row takes is counted as well.
            if not self.sites:
                return [[None, 0, 0]]
            if self.turns(tokens) > 1:
                return [[self.rows, 0, 0], [None, 1, self.rows + 1]]
            return [[self.rows, self.groups() - 1, self.rows + 1]]
        if self.kernel == "score":
            return [[self.span(tokens)]]
        if self.kernel == "score_group":
            # Programs that form the row, and read it back; those of the other rows.
            return [[self.chunks(), self.chunks()], [0, self.chunks()]]
        if self.kernel == "mix_group":
            # The first site's, the only one that reduces; the chunks of the later sites.  Whose
            # loop comes first, the compiler decides.
            both = [[self.rows + 1, None], [None, self.rows + 1]]
            reduces = "SHFL" in {one.opcode for one in sass.path(found.code, both[0])}
            return both if reduces else both[::-1]
        if self.kernel in ("merge", "weigh_group"):
            return [[]]
        return [[-(-self.rows // found.config["TILE"])]]

    def chunks(self) -> int:
        """Of the hidden size, if a program takes it in chunks or one of them."""
        return -(-self.hidden // self.binary().config["CHUNK"])

    def span(self, tokens: int) -> int:
        """Tokens of a program."""
        if self.kernel == "score_group":
            return self.binary().config["TOKENS"]
        if self.kernel != "score":
            return 1
        return -(-tokens * self.groups() // score_rows.SCORE_PROGRAMS)

    def pattern(self) -> list[int]:
        """The kinds of programs that follow one another, if there are several at once."""
        if self.kernel == "score_group":
            return [0] + [1] * self.rows
        if self.kernel == "mix_group":
            return [0] + [1] * self.chunks() * self.groups()
        return [0]

    def count(self, tokens: int) -> int:
        """Of programs."""
        spans = -(-tokens // self.span(tokens))
        if self.kernel == "score":
            return spans * self.groups() * self.rows
        return spans * self.turns(tokens) * len(self.pattern())

    def unique(self, tokens: int) -> list[float]:
        """Bytes from and to HBM of a program of each kind, without what is read once for all."""
        each = (self.bytes(2 * tokens) - self.bytes(tokens)) / tokens
        vector = DTYPE.itemsize * self.hidden
        if self.kernel == "score_group":
            scores = 4 * self.sites
            own = each - self.rows * (vector + scores)
            return [self.span(tokens) * own, self.span(tokens) * (vector + scores)]
        if self.kernel == "mix_group":
            answers = (self.sites - 1) * vector
            return [each - answers, answers / (len(self.pattern()) - 1)]
        return [each * tokens / self.count(tokens)] * len(self.rounds(tokens))

    def again(self, tokens: int) -> list[int]:
        """Addresses from which on a program of each kind loads from L2, as it or another did."""
        code = self.binary().code
        never = code[-1].address
        if self.kernel == "score_group":
            return [sass.loops(code)[1], never]
        if self.kernel == "mix_group":
            return [never, code[0].address]
        # Turns that follow one another find the rows in L2.
        in_turn = self.kernel == "open_group" and self.turns(tokens) == 1
        return [sass.loops(code)[1] if in_turn else never] * len(self.rounds(tokens))

    def works(self, tokens: int, from_l2: bool) -> list[issue.Work]:
        """What each kind of program executes; ``from_l2``: everything that it reads is in L2."""
        found, made = self.binary(), []
        kinds = zip(self.rounds(tokens), self.unique(tokens), self.again(tokens), strict=True)
        for rounds, unique, again in kinds:
            path = sass.path(found.code, rounds)
            cold = [not from_l2 and (one.address < again or one.opcode == "STG") for one in path]
            made.append(issue.Work.of(path, found.warps, 0.0 if from_l2 else unique, cold))
        return made

    def in_order(self, tokens: int) -> list["Launch"]:
        """The launches of one after the other that this one is with so many tokens."""
        if self.kernel != "open_group" or not self.sites:
            return [self]
        shape = self.rows + 1, self.sites, self.hidden, DTYPE
        if self.config is None and open_group.by_product(tokens, *shape):
            names = "score_group", "weigh_group", "mix_group"
            return [self._replace(kernel=name) for name in names]
        return [self._replace(sites=0), self] if self.turns(tokens) > 1 else [self]

    def seconds(self, tokens: int, gpu: Gpu, from_l2: bool = False) -> float:
        """Of the launch, by the model."""
        return sum(_seconds(one, tokens, gpu, from_l2) for one in self.in_order(tokens))


@cache
def _seconds(launch: Launch, tokens: int, gpu: Gpu, from_l2: bool) -> float:
    programs, resident = launch.count(tokens), launch.binary().resident
    works, pattern = launch.works(tokens, from_l2), launch.pattern()
    if max(pattern):
        return machine.LAUNCH + seconds_of(works, pattern, programs, resident, gpu)
    # Of turns side by side the longest is taken for all.
    return machine.LAUNCH + max(
        seconds_of([work], pattern, programs, resident, gpu) for work in works
    )


def seconds_of(
    works: Sequence[issue.Work], pattern: Sequence[int], programs: int, resident: int, gpu: Gpu
) -> float:
    """Until the SM that has the most programs has executed them."""
    most = -(-programs // gpu.sms)
    clock = gpu.clock if most > 1 else gpu.idle_clock
    share = gpu.memory / clock / min(programs, gpu.sms)

    def cycles(some: int) -> float:
        order = [pattern[index % len(pattern)] for index in range(some)]
        return issue.cycles(works, order, resident, share)

    rounds = -(-3 * resident // len(pattern)) * len(pattern)
    if most <= 2 * rounds:
        return cycles(most) / clock
    # Beyond that all rounds are alike.
    few, more = cycles(rounds), cycles(2 * rounds)
    return (more + (more - few) * (most - 2 * rounds) / rounds) / clock


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
