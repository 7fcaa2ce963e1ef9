"""One SM executing programs in order, cycle by cycle.

Four schedulers issue at most one instruction a cycle each, of a warp whose stall is over, whose
scoreboards are free and whose pipe is.  Loads wait in a queue of the bandwidth that the SM gets.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from benchmarks.kernels.model import machine
from benchmarks.kernels.model.sass import NONE, Instruction

COLUMNS = STALL, WAIT, RELEASES, FREES, PIPE, HOLD, RESULT, ACCESS, BARRIER, COPIES = range(10)
COPIED, COMMITTED, AWAITED = 1, 2, 3  # a copy, the end of a group of them, and 3 + groups left
MOST_GROUPS = 8
NEVER = 1 << 60


@dataclass(frozen=True)
class Work:
    """What the warps of a program execute, and what its accesses cost.

    ``hbm``: by instruction, the bytes of a warp that come from HBM or go there.
    """

    table: np.ndarray  # [instructions, COLUMNS] int64
    hbm: np.ndarray  # [instructions] float64
    warps: int

    @classmethod
    def of(
        cls, path: Sequence[Instruction], warps: int, unique: float, cold: Sequence[bool]
    ) -> "Work":
        """From a path.

        Args:
            path: what each warp executes.
            warps: of a program.
            unique: bytes that one program moves from or to HBM.  The path has more: masked loads,
                padding, and what many programs read alike.  It is spread over its cold accesses.
            cold: of each instruction, whether it is an access to HBM.
        """
        table = np.zeros((len(path), len(COLUMNS)), np.int64)
        moved = np.zeros(len(path))
        for index, one in enumerate(path):
            pipe, hold = machine.pipe(one)
            copies = COPIED * (one.opcode == machine.COPY) + COMMITTED * (one.opcode == "LDGDEPBAR")
            if one.left is not None:
                copies = AWAITED + one.left
            if one.opcode in ("LDG", machine.COPY):
                latency = machine.HBM_LATENCY if cold[index] else machine.L2_LATENCY
            else:
                latency = machine.RESULT.get(one.opcode, machine.OTHER_RESULT)
            access = 32 * one.bytes if one.opcode in machine.GLOBAL_MEMORY else 0
            moved[index] = access * cold[index]
            table[index] = (
                *(max(one.stall, 1), one.wait, one.releases, one.frees, pipe, hold, latency),
                *(access, one.opcode == "BAR", copies),
            )
        raw = warps * moved.sum()
        return cls(table, moved * (unique / raw if raw else 0.0), warps)


def cycles(
    works: Sequence[Work], order: Sequence[int], resident: int, bytes_per_cycle: float
) -> float:
    """Cycles until an SM has executed programs one after the other, some at a time.

    Args:
        works: what a program of each kind executes; the kinds have equally many warps.
        order: the kind of each program that this SM gets.
        resident: how many fit on it at once.
        bytes_per_cycle: the SM's share of the memory's bandwidth.
    """
    rates = bytes_per_cycle, machine.L2_BYTES
    delays = machine.OPERANDS_READ, machine.BARRIER, machine.NEXT_PROGRAM
    table = np.concatenate([work.table for work in works])
    moved = np.concatenate([work.hbm for work in works])
    ends = np.cumsum([len(work.table) for work in works])
    spans = np.stack([ends - [len(work.table) for work in works], ends], axis=1)[list(order)]
    state = table, moved, works[0].warps, spans, min(resident, len(order))
    return _run(*state, machine.LSU, machine.SCHEDULERS, rates, delays)


@njit(cache=True)
def _run(table, hbm, warps, spans, resident, shared, schedulers, rates, delays):
    """``cycles``, compiled; ``shared`` is the pipe that the schedulers share.

    ``spans``: of each program, where its instructions begin and end in the table.
    """
    hbm_rate, l2_rate = rates
    operands_read, barrier, next_program = delays
    programs, slots = spans.shape[0], resident * warps
    at = np.repeat(spans[:resident, 0], warps)  # the next instruction of each warp
    end = np.repeat(spans[:resident, 1], warps)
    ready = np.zeros(slots, np.int64)  # when its stall is over
    board = np.zeros((slots, NONE), np.int64)  # when each of its scoreboards is free
    waiting = np.zeros(slots, np.bool_)  # at a barrier or at the end
    arrived = np.zeros(resident, np.int64)  # of each program's warps, those that wait
    copied = np.zeros(slots, np.int64)  # when the copies of its group so far have arrived
    groups = np.zeros((slots, MOST_GROUPS), np.int64)  # and when those of the last groups have
    committed = np.zeros(slots, np.int64)
    free = np.zeros((schedulers, shared + 1), np.int64)  # when each pipe is
    turn = np.zeros(schedulers, np.int64)
    started, ended = resident, 0
    now, memory, cache = np.int64(0), 0.0, 0.0
    each = (slots + schedulers - 1) // schedulers
    while ended < programs:
        soonest = NEVER
        for scheduler in range(schedulers):
            for step in range(each):
                place = (turn[scheduler] + step) % each
                warp = scheduler + schedulers * place
                if warp >= slots or waiting[warp]:
                    continue
                row = table[at[warp]]
                pipe = row[PIPE]
                owner = 0 if pipe == shared else scheduler
                when = max(ready[warp], free[owner, pipe])
                for one in range(6):
                    if row[WAIT] >> one & 1:
                        when = max(when, board[warp, one])
                if when > now:
                    soonest = min(soonest, when)
                    continue
                turn[scheduler] = (place + 1) % each
                soonest = now + 1
                free[owner, pipe] = now + row[HOLD]
                result = now
                if row[ACCESS]:
                    cache = max(cache, float(now)) + row[ACCESS] / l2_rate
                    late = cache
                    if hbm[at[warp]] > 0:
                        memory = max(memory, float(now)) + hbm[at[warp]] / hbm_rate
                        late = max(late, memory)
                    result = np.int64(late)
                if row[RELEASES] != NONE:
                    releases = row[RELEASES]
                    board[warp, releases] = max(board[warp, releases], result + row[RESULT])
                if row[FREES] != NONE:
                    board[warp, row[FREES]] = max(board[warp, row[FREES]], now + operands_read)
                ready[warp] = now + row[STALL]
                if row[COPIES] == COPIED:
                    copied[warp] = max(copied[warp], result + row[RESULT])
                elif row[COPIES] == COMMITTED:
                    groups[warp, committed[warp] % MOST_GROUPS] = copied[warp]
                    committed[warp] += 1
                elif row[COPIES] >= AWAITED:
                    last = committed[warp] - 1 - (row[COPIES] - AWAITED)
                    if last >= 0:
                        ready[warp] = max(ready[warp], groups[warp, last % MOST_GROUPS])
                at[warp] += 1
                done = at[warp] == end[warp]
                if not done and not row[BARRIER]:
                    break
                program = warp // warps
                waiting[warp] = True
                arrived[program] += 1
                if arrived[program] < warps:
                    break
                arrived[program] = 0
                ended += done
                begins = done and started < programs
                if begins:
                    begin, stop = spans[started]
                    started += 1
                for other in range(program * warps, program * warps + warps):
                    waiting[other] = done and not begins
                    ready[other] = max(ready[other], now + (next_program if done else barrier))
                    if begins:
                        at[other], end[other] = begin, stop
                        board[other] = 0
                break
        now = soonest if soonest < NEVER else now + 1
    return max(float(now), memory)
