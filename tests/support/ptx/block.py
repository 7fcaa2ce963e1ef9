"""A program (a block of threads) that executes: all warps in step, and barriers between them.

Warps of a GPU run in any order between two barriers.  Here they run in one order, and ``races``
says whether another could have had another result.  So a branch must be taken by all threads or by
none, as in all code that Triton makes of these kernels.
"""

import re
from collections.abc import Callable

import numpy as np

from ptx.errors import (
    DivergenceError,
    EarlyAccessError,
    MisalignedError,
    PtxError,
    UnknownInstructionError,
)
from ptx.formats import FORMATS, immediate
from ptx.memory import Memory, shared_memory
from ptx.operations import operation
from ptx.parse import Address, Guard, Instruction, Operand, Program

WARP = 32
_MOST_STEPS = 10**5  # a loop that never ends is a fault too
_ACCESS = re.compile(
    r"(?P<kind>ld|st)\.(?P<space>global|shared)(?:\.v[248])?\.(?P<type>[bus](?:8|16|32|64))"
)
_SHUFFLE = re.compile(r"shfl\.sync\.(?P<how>bfly|idx)\.b32")
_MATRICES = re.compile(
    r"(?P<kind>ld|st)matrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<trans>\.trans)?\.shared\.b16"
)
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global")
_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
_WAIT = "griddepcontrol.wait"

Step = Callable[["Block"], int | None]


class Code:
    """A kernel as functions of a block, one an instruction; a branch returns the next index.

    Raises:
        UnknownInstructionError: where any instruction is not known, executed or not.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.waits = any(each.opcode == _WAIT for each in program.instructions)
        self.steps: list[Step] = []
        for instruction in program.instructions:
            try:
                self.steps.append(self._step(instruction))
            except (UnknownInstructionError, ValueError) as error:
                raise UnknownInstructionError(instruction.text) from error

    def _step(self, instruction: Instruction) -> Step:
        _, guard, opcode, operands = instruction
        if opcode in ("bra", "bra.uni"):
            return _branch(guard, self.program.labels[str(operands[0])])
        if opcode == "ret":
            return _branch(guard, len(self.program.instructions))
        if opcode.startswith("ld.param."):
            return _parameter(operands, opcode.removeprefix("ld.param."), guard)
        if access := _ACCESS.fullmatch(opcode):
            return _access(access, operands, guard)
        if _COPY.fullmatch(opcode):
            return _copy(operands, guard)
        if opcode.startswith("mov.") and any(isinstance(each, tuple) for each in operands):
            return _regroup(opcode, operands, guard)
        if not guard:
            if opcode == "bar.sync" and operands == ("0",):
                return Block.wait_for_all
            if opcode == "bar.warp.sync" and operands == ("-1",):
                return Block.wait_for_warp
            if opcode == _WAIT:
                return Block.wait_for_predecessor
            if shuffle := _SHUFFLE.fullmatch(opcode):
                return _shuffle(shuffle["how"], operands)
            if matrices := _MATRICES.fullmatch(opcode):
                return _matrices(matrices, operands)
            if opcode == "cp.async.commit_group":
                return Block.commit_copies
            if opcode == "cp.async.wait_group":
                return _wait_for_copies(int(str(operands[0])))
            if opcode == _PRODUCT:
                return _product(operands)
        return _compute(opcode, operands, guard)


class Block:
    """Registers of a program's threads, and the memories that they see.

    Args:
        code: what they execute.
        parameters: bits of the kernel's parameters by name.
        index, grid: which program of how many, in three dimensions.
        memory: global memory, that of the launch.
        shared: bytes of shared memory.
    """

    def __init__(
        self,
        code: Code,
        parameters: dict[str, int],
        index: tuple[int, int, int],
        grid: tuple[int, int, int],
        memory: Memory,
        shared: int,
    ) -> None:
        self.code, self.parameters = code, parameters
        self.threads = code.program.threads
        thread = np.arange(self.threads)
        self.warp = thread // WARP
        self.number = np.full_like(thread, (index[2] * grid[1] + index[1]) * grid[0] + index[0])
        self.spaces = {"global": memory, "shared": shared_memory(shared)}
        self.waiting = code.waits
        self.copies: list[list[Step]] = [[]]  # under way; by group, the last is not yet committed
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": thread.astype(np.uint32),
            "global_smem": np.zeros(self.threads, np.uint32),
        }
        for axis, at, size in zip("xyz", index, grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(self.threads, at, np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(self.threads, size, np.uint32)

    def run(self) -> None:
        """Execute from the first instruction to the return.

        Raises:
            PtxError: on the first fault; the message names the instruction.
        """
        at, instructions = 0, self.code.program.instructions
        self.spaces["global"].by_warp.next_epoch()
        for _ in range(_MOST_STEPS):
            if at == len(instructions):
                return
            try:
                target = self.code.steps[at](self)
            except PtxError as error:
                raise type(error)(f"{instructions[at].text}: {error}") from error
            at = at + 1 if target is None else target
        raise PtxError(f"no end after {_MOST_STEPS} instructions")

    def get(self, operand: Operand, kind: str) -> np.ndarray:
        """Bits of a register or constant in the type ``kind``, ``[threads]`` or ``[1]``."""
        if not isinstance(operand, str):
            raise UnknownInstructionError(str(operand))
        if operand not in self.registers and not operand.startswith("%"):
            return immediate(operand, kind)
        bits = self.registers[operand]
        if bits.dtype != FORMATS[kind].bits:
            raise UnknownInstructionError(f"{operand} has {bits.dtype}, not {kind}")
        return bits

    def put(self, register: str, bits: np.ndarray, guard: Guard | None) -> None:
        """Set a register in the threads that execute; never set, it is NaN in the others."""
        bits = np.broadcast_to(bits, self.threads)
        if guard:
            before = self.registers.get(register)
            if before is None:
                before = np.full_like(bits, ~bits.dtype.type(0))
            bits = np.where(self.executing(guard), bits, before)
        self.registers[register] = np.ascontiguousarray(bits)

    def executing(self, guard: Guard | None) -> np.ndarray:
        """Which threads execute an instruction."""
        if guard is None:
            return np.ones(self.threads, bool)
        return self.registers[guard.register] ^ guard.negated

    def wait_for_all(self) -> None:
        """``bar.sync``: what follows comes after what was before, in all threads."""
        for memory in self.spaces.values():
            memory.by_warp.next_epoch()

    def wait_for_warp(self) -> None:
        """``bar.warp.sync``: lanes are in step anyhow."""

    def commit_copies(self) -> None:
        """``cp.async.commit_group``: copies from here on belong to another group."""
        self.copies.append([])

    def wait_for_predecessor(self) -> None:
        """``griddepcontrol.wait``: the launch before has completed."""
        self.waiting = False

    def locate(self, operand: Operand) -> np.ndarray:
        """Addresses of an operand ``[register+offset]``."""
        if not isinstance(operand, Address):
            raise UnknownInstructionError(str(operand))
        return self.registers[operand.base].astype(np.int64) + operand.offset


def _compute(opcode: str, operands: tuple[Operand, ...], guard: Guard | None) -> Step:
    target, *sources = operands
    result, kinds, function = operation(opcode, len(sources))
    if not isinstance(target, str):
        raise UnknownInstructionError(opcode)

    def step(block: Block) -> None:
        numbers = (
            FORMATS[kind].decode(block.get(source, kind))
            for source, kind in zip(sources, kinds, strict=True)
        )
        block.put(target, FORMATS[result].encode(function(*numbers)), guard)

    return step


def _branch(guard: Guard | None, target: int) -> Step:
    def step(block: Block) -> int | None:
        taken = block.executing(guard)
        if taken.any() and not taken.all():
            raise DivergenceError(f"{int(taken.sum())} of {block.threads} threads branch")
        return target if taken.all() else None

    return step


def _parameter(operands: tuple[Operand, ...], kind: str, guard: Guard | None) -> Step:
    """Into a register that may be wider than the parameter."""
    target, source = operands
    assert isinstance(target, str) and isinstance(source, Address) and not guard

    def step(block: Block) -> None:
        if source.offset:
            raise UnknownInstructionError(str(source))
        number = FORMATS[kind].decode(immediate(str(block.parameters[source.base]), kind))
        wide = FORMATS[block.code.program.registers[target.rstrip("0123456789")]].bits
        block.put(target, number.astype(wide) if kind[0] in "us" else number.view(wide), None)

    return step


def _access(found: re.Match[str], operands: tuple[Operand, ...], guard: Guard | None) -> Step:
    """Loads and stores of one register or a vector of them."""
    loads, space = found["kind"] == "ld", found["space"]
    registers, where = operands if loads else reversed(operands)
    names = registers if isinstance(registers, tuple) else (registers,)
    bits = FORMATS[found["type"]].bits
    size = np.dtype(bits).itemsize * len(names)

    def step(block: Block) -> None:
        if space == "global" and block.waiting:
            raise EarlyAccessError(f"before {_WAIT}")
        chosen = np.flatnonzero(block.executing(guard))
        memory = block.spaces[space]
        agents = block.warp[chosen], block.number[chosen]
        address = block.locate(where)[chosen]
        if loads:
            data = np.empty((block.threads, size), np.uint8)
            data[chosen] = memory.load(address, size, *agents)
            for name, values in zip(names, data.view(bits).T, strict=True):
                block.put(name, values, guard)
        else:
            values = [
                np.broadcast_to(block.get(name, found["type"]), block.threads) for name in names
            ]
            data = np.stack(values, axis=1)[chosen].view(np.uint8)
            memory.store(address, data, *agents)

    return step


def _copy(operands: tuple[Operand, ...], guard: Guard | None) -> Step:
    """From global memory to shared, where it arrives no sooner than a thread has waited for it.

    The last operand says how many bytes are copied; the others become zero.
    """
    target, source, size, *count = operands
    size = int(str(size), 0)

    def step(block: Block) -> None:
        if block.waiting:
            raise EarlyAccessError(f"before {_WAIT}")
        executing = block.executing(guard)
        copied = block.get(count[0], "u32") if count else np.uint32(size)
        if np.isin(copied, (0, size), invert=True).any():
            raise UnknownInstructionError("a copy of a part")
        agents = block.warp, block.number
        chosen = np.flatnonzero(executing & (copied > 0))
        data = np.zeros((block.threads, size), np.uint8)
        data[chosen] = block.spaces["global"].load(
            block.locate(source)[chosen], size, *(agent[chosen] for agent in agents)
        )
        where, written = block.locate(target), np.flatnonzero(executing)
        block.copies[-1].append(
            lambda block: block.spaces["shared"].store(
                where[written], data[written], *(agent[written] for agent in agents)
            )
        )

    return step


def _wait_for_copies(groups: int) -> Step:
    """Until no more than the last so many groups are under way."""

    def step(block: Block) -> None:
        *committed, last = block.copies
        left = len(committed) - groups
        for copy in (each for group in committed[: max(left, 0)] for each in group):
            copy(block)
        block.copies = [*committed[max(left, 0) :], last]

    return step


def _regroup(opcode: str, operands: tuple[Operand, ...], guard: Guard | None) -> Step:
    """``mov`` between a register and the two that are its halves, the low one first."""
    whole = opcode.removeprefix("mov.")
    half = {"b32": "b16", "b64": "b32"}[whole]
    target, source = operands

    def step(block: Block) -> None:
        if isinstance(target, tuple):
            bits = np.broadcast_to(block.get(source, whole), block.threads)
            halves = np.ascontiguousarray(bits).view(FORMATS[half].bits).reshape(-1, 2)
            for name, values in zip(target, halves.T, strict=True):
                if name != "_":
                    block.put(name, values, guard)
        else:
            assert isinstance(source, tuple)
            values = np.broadcast_arrays(*(block.get(name, half) for name in source))
            joined = np.ascontiguousarray(np.stack(values, axis=1))
            block.put(str(target), joined.view(FORMATS[whole].bits)[:, 0], guard)

    return step


def _shuffle(how: str, operands: tuple[Operand, ...]) -> Step:
    """Every lane gets the register of another lane of its warp."""
    target, source, lane, clamp, members = operands
    if (clamp, members) != ("31", "-1"):
        raise UnknownInstructionError("shfl within a part of a warp")

    def step(block: Block) -> None:
        thread = np.arange(block.threads)
        by = block.get(lane, "u32").astype(np.int64)
        other = thread ^ by if how == "bfly" else thread // WARP * WARP + by % WARP
        values = np.broadcast_to(block.get(source, "b32"), block.threads)
        block.put(str(target).partition("|")[0], values[other], None)

    return step


def _matrices(found: re.Match[str], operands: tuple[Operand, ...]) -> Step:
    """Matrices of 8 x 8 halves, whose rows are at the addresses of eight lanes each.

    A lane has two neighbours of each matrix, or of its transpose: of row ``lane // 4`` the columns
    from ``lane % 4 * 2`` on.
    """
    loads = found["kind"] == "ld"
    registers, where = operands if loads else reversed(operands)
    if not isinstance(registers, tuple) or len(registers) != int(found["count"]):
        raise UnknownInstructionError(found[0])

    def step(block: Block) -> None:
        thread = np.arange(block.threads)
        address, memory = block.locate(where), block.spaces["shared"]
        if (address % 16).any():
            raise MisalignedError("a row of 16 bytes")
        for matrix, name in enumerate(registers):
            first = thread // WARP * WARP + matrix * 8
            halves = np.empty((block.threads, 2, 2), np.uint8)
            if not loads:
                values = np.broadcast_to(block.get(name, "b32"), block.threads)
                halves = np.ascontiguousarray(values).view(np.uint8).reshape(halves.shape)
            for half in range(2):
                place = thread % WARP // 4, thread % 4 * 2 + half
                row, column = reversed(place) if found["trans"] else place
                at = address[first + row] + column * 2
                if loads:
                    halves[:, half] = memory.load(at, 2, block.warp, block.number)
                else:
                    memory.store(at, halves[:, half], block.warp, block.number)
            if loads:
                block.put(name, halves.reshape(-1).view(np.uint32), None)

    return step


def _product(operands: tuple[Operand, ...]) -> Step:
    """``D = A B + C`` by a warp: A ``[16, 16]`` and B ``[16, 8]`` bfloat16, C and D float32.

    A lane has two neighbours of A's and of C's rows ``lane // 4`` and eight below, and of B's
    column ``lane // 4``; from ``lane % 4 * 2`` on, and of A and B eight farther on as well (PTX
    ISA, matrix fragments for mma.m16n8k16).  How the hardware rounds a sum is not specified.  It is
    known to cut off (Fasi et al., "Numerical behavior of NVIDIA tensor cores", PeerJ Comput. Sci.
    2021), and so does this, once.
    """
    results, rows, columns, sums = operands

    def values(block: Block, names: Operand, kind: str) -> np.ndarray:
        """``[warps, registers, 8, 4, numbers of a register]``"""
        assert isinstance(names, tuple)
        bits = np.stack([np.broadcast_to(block.get(name, "b32"), block.threads) for name in names])
        numbers = FORMATS[kind].decode(np.ascontiguousarray(bits).view(FORMATS[kind].bits))
        return numbers.reshape(len(names), block.threads // WARP, 8, 4, -1).swapaxes(0, 1)

    def step(block: Block) -> None:
        # Registers of A: the upper rows, the lower, and both again eight columns on.
        a = values(block, rows, "bf16").astype(np.float64)
        a = a.reshape(-1, 2, 2, 8, 8).transpose(0, 2, 3, 1, 4).reshape(-1, 16, 16)
        b = values(block, columns, "bf16").astype(np.float64)
        b = b.reshape(-1, 2, 8, 8).transpose(0, 2, 1, 3).reshape(-1, 8, 16)
        c = values(block, sums, "f32").astype(np.float64)  # [warps, 4, 8, 4, 1]
        c = c.reshape(-1, 2, 2, 8, 4).transpose(0, 1, 3, 4, 2).reshape(-1, 16, 8)
        exact = np.einsum("wmk,wnk->wmn", a, b) + c
        d = exact.astype(np.float32)
        d = np.where(np.abs(d) > np.abs(exact), np.nextafter(d, np.float32(0)), d)
        d = d.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for name, found in zip(results, d, strict=True):
            block.put(name, np.ascontiguousarray(found).view(np.uint32), None)

    return step
