"""The emulator of PTX notices what a kernel may not do, in kernels of a few lines."""

import numpy as np
import pytest
import torch
import triton_interpreter  # noqa: F401  (it chooses the interpreter before Triton is imported)
from ptx.errors import (
    DivergenceError,
    EarlyAccessError,
    MisalignedError,
    OutOfBoundsError,
    PtxError,
    RaceError,
    UnknownInstructionError,
)
from ptx.formats import FORMATS
from ptx.launch import Moved, execute
from ptx.memory import Tensors
from ptx.operations import operation

HEAD = """.visible .entry kernel(
    .param .u64 kernel_param_0
)
.reqntid 64
{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    setp.lt.u32 %p1, %r1, 32;
"""


def _run(code: str, programs: int = 1) -> tuple[Moved, torch.Tensor]:
    """Run 64 threads on 64 numbers and return what was moved, and the numbers."""
    numbers = torch.arange(64, dtype=torch.int32)
    tensors = Tensors([numbers])
    ptx = f"{HEAD}{code}\nret;\n}}\n"
    moved = execute(ptx, [tensors.address(numbers)], (programs,), tensors, shared=256)
    tensors.write_back()
    return moved, numbers


NEIGHBOUR = "xor.b32 %r3, %r1, 32; shl.b32 %r4, %r1, 2; shl.b32 %r5, %r3, 2;"
EXCHANGE = f"""{NEIGHBOUR}
st.shared.b32 [%r4], %r1;
bar.sync 0;
ld.shared.b32 %r6, [%r5];
st.global.b32 [%rd2], %r6;"""


def test_a_kernel_without_fault() -> None:
    """Two warps exchange their numbers through shared memory."""
    moved, numbers = _run(EXCHANGE)
    assert torch.equal(numbers, torch.arange(64, dtype=torch.int32) ^ 32)
    assert moved == Moved(read=0, written=256)


FAULTS = {
    "a missing barrier": (EXCHANGE.replace("bar.sync 0;", ""), RaceError),
    "a barrier after the read": (
        EXCHANGE.replace("bar.sync 0;", "").replace("st.global", "bar.sync 0; st.global"),
        RaceError,
    ),
    "a write after a read": (
        f"{NEIGHBOUR} ld.shared.b32 %r6, [%r5]; st.shared.b32 [%r4], %r6;",
        RaceError,
    ),
    "two values at one address": ("st.global.b32 [%rd1], %r1;", RaceError),
    "behind the last element": ("ld.global.b32 %r3, [%rd2+4];", OutOfBoundsError),
    "before the first": ("st.global.b32 [%rd2+-4], %r1;", OutOfBoundsError),
    "behind shared memory": ("ld.shared.b32 %r3, [global_smem+256];", OutOfBoundsError),
    "an odd address": ("ld.global.b32 %r3, [%rd1+2];", MisalignedError),
    "too wide for its address": ("ld.global.v2.b32 {%r3, %r4}, [%rd1+4];", MisalignedError),
    "a branch of some threads": ("@%p1 bra $L__1; $L__1: mov.u32 %r3, %r1;", DivergenceError),
    "memory before the wait": ("ld.global.b32 %r3, [%rd2]; griddepcontrol.wait;", EarlyAccessError),
    "no end": ("$L__1: bra.uni $L__1;", PtxError),
    "an unknown instruction": ("popc.b32 %r3, %r1;", UnknownInstructionError),
    "an unknown modifier": ("ld.global.cv.b32 %r3, [%rd2];", UnknownInstructionError),
    "an unknown barrier": ("bar.sync 1, 32;", UnknownInstructionError),
    "an operand of another width": ("add.s32 %r3, %rd1, 1;", UnknownInstructionError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str) -> None:
    """The message has the instruction."""
    code, error = FAULTS[fault]
    with pytest.raises(error):
        _run(code)


def test_programs_are_in_no_order() -> None:
    """What one writes no other may touch, except with the same value."""
    with pytest.raises(RaceError, match="programs"):
        _run("add.s32 %r3, %r1, %r2; st.global.b32 [%rd2], %r3;", programs=2)
    with pytest.raises(RaceError, match="programs"):
        _run("ld.global.b32 %r3, [%rd2]; st.global.b32 [%rd2], %r3;", programs=2)
    _run("st.global.b32 [%rd2], 7;", programs=2)


def test_threads_that_do_not_execute_touch_nothing() -> None:
    """Bytes are counted once, and a row that is read back is not read."""
    code = "@%p1 st.global.b32 [%rd2], 7; @%p1 ld.global.b32 %r3, [%rd2]; @!%p1 ld.global.b32"
    moved, numbers = _run(f"{code} %r3, [%rd2]; @%p1 ld.global.b32 %r3, [%rd2];")
    assert moved == Moved(read=128, written=128)
    assert numbers.tolist() == [7] * 32 + list(range(32, 64))


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_halves_are_rounded_as_torch_rounds_them(kind: str, dtype: torch.dtype) -> None:
    """Every bit pattern as a number, and sums and float32 numbers rounded to nearest."""
    patterns = np.arange(2**16, dtype=np.uint16)
    halves = torch.from_numpy(patterns.view(np.int16)).view(dtype)
    other = np.random.default_rng(0).permutation(patterns)
    with np.errstate(all="ignore"):
        decoded = FORMATS[kind].decode(patterns)
        total = operation(f"add.rn.{kind}", 2).function(decoded, FORMATS[kind].decode(other))
        found = FORMATS[kind].encode(total)
    assert np.array_equal(decoded, halves.double().numpy(), equal_nan=True)
    wanted = halves + torch.from_numpy(other.view(np.int16)).view(dtype)
    numbers = ~wanted.isnan().numpy()
    assert np.array_equal(found[numbers], wanted.view(torch.int16).numpy().view(np.uint16)[numbers])


def test_integers_are_divided_towards_zero() -> None:
    """As in C, and unlike NumPy."""
    x, y = np.array([7, -7, 7, -7], np.int32), np.array([2, 2, -2, -2], np.int32)
    assert operation("div.s32", 2).function(x, y).tolist() == [3, -3, -3, 3]
    assert operation("rem.s32", 2).function(x, y).tolist() == [1, -1, 1, -1]


def test_fields_of_bits_have_their_sign() -> None:
    """A field may be one bit, which is its sign."""
    x, begin, length = np.array([0b1011000, -1]), np.array([3]), np.array([2])
    assert operation("bfe.u32", 3).function(x.astype(np.uint32), begin, length).tolist() == [3, 3]
    assert operation("bfe.s32", 3).function(x.astype(np.int32), begin, length).tolist() == [-1, -1]
    one = operation("bfe.s32", 3).function(x.astype(np.int32), np.array([5]), np.array([1]))
    assert one.tolist() == [0, -1]


def test_bytes_are_chosen() -> None:
    """By nibbles, of both sources; with its highest bit a nibble takes a byte's sign."""
    x, y, chosen = (np.array([n], np.uint32) for n in (0x44332211, 0x887766F5, 0x7632))
    permute = operation("prmt.b32", 3).function
    assert permute(x, y, chosen) == 0x88774433
    assert permute(x, y, np.array([0x0C84], np.uint32)) == 0x11FF00F5


# Copies to shared memory


COPY = f"""{NEIGHBOUR}
st.shared.b32 [%r4], 7;
cp.async.ca.shared.global [%r4], [%rd2], 0x4;
cp.async.commit_group;
cp.async.wait_group 0;
bar.sync 0;
ld.shared.b32 %r6, [%r5];
st.global.b32 [%rd2], %r6;"""


def test_a_copy_is_there_for_all_behind_a_wait_and_a_barrier() -> None:
    _, numbers = _run(COPY)
    assert torch.equal(numbers, torch.arange(64, dtype=torch.int32) ^ 32)
    with pytest.raises(RaceError):
        _run(COPY.replace("bar.sync 0;", ""))


def test_a_copy_that_nothing_waits_for_is_not_there() -> None:
    """Nor one of the last group of so many as may be under way."""
    for wait in ("", "cp.async.wait_group 1;"):
        _, numbers = _run(COPY.replace("cp.async.wait_group 0;", f"bar.sync 0; {wait}"))
        assert numbers.tolist() == [7] * 64


def test_a_copy_of_no_bytes_is_zeros() -> None:
    """And reads nothing."""
    moved, numbers = _run(
        COPY.replace("0x4;", "0x4, %r9;").replace("cp.", "mov.b32 %r9, 0; cp.", 1)
    )
    assert numbers.tolist() == [0] * 64 and moved.read == 0


# Products


def test_a_product_cuts_off_its_sum() -> None:
    """2^24 + 16 x 1.09375 is between two float32 numbers, nearer to the one above."""
    product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    _, numbers = _run(
        f"""mov.b32 %r3, 0x3F803F80; mov.b32 %r4, 0x3F8C3F8C; mov.b32 %r5, 0x4B800000;
        {product} {{%r6, %r7, %r8, %r9}},
        {{%r3, %r3, %r3, %r3}}, {{%r4, %r4}}, {{%r5, %r5, %r5, %r5}};
        st.global.b32 [%rd2], %r9;"""
    )
    assert numbers.view(torch.float32).tolist() == [2.0**24 + 16] * 64


def test_a_product_of_matrices() -> None:
    """Of lane ``l`` A has ``l`` and B ``l + 1``, in all places; C is zero."""
    load = "cvt.rn.f32.s32 %r3, %r1; cvt.rn.bf16x2.f32 %r4, %r3, %r3; add.s32 %r5, %r1, 1;"
    load += " cvt.rn.f32.s32 %r5, %r5; cvt.rn.bf16x2.f32 %r5, %r5, %r5; mov.b32 %r6, 0;"
    product = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    product += " {%r7, %r7, %r8, %r8}, {%r4, %r4, %r4, %r4}, {%r5, %r5}, {%r6, %r6, %r6, %r6};"
    for register in ("%r7", "%r8"):
        _, numbers = _run(f"{load} {product} st.global.b32 [%rd2], {register};")
        lane = np.arange(64) % 32
        first = np.arange(64) // 32 * 32
        # Row ``lane // 4`` of A is of the four lanes of that group; so is a column of B.
        rows, column = lane // 4, lane % 4 * 2 + 1
        of_a = (first + rows * 4)[:, None] + np.arange(4)
        of_b = (first + column * 4)[:, None] + np.arange(4) + 1
        assert numbers.view(torch.float32).tolist() == (4 * (of_a * of_b).sum(1)).tolist()
