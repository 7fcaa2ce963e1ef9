"""The cpp backend: vectorised C++ on CPU, compiled once by the machine's compiler.

Each function is a torch operator, opaque to a compiler: no kernel per number of sources is
generated, and a site costs one call.  In decode a call is mostly overhead, because the caches are
full of other weights: so it takes few arguments, and a site returns no new tensor.
``interface`` describes the functions, ``operators.cpp`` and ``kernels.cpp`` are their code.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from attnres_serve.kernels.cpp import direct as cpp_direct
from attnres_serve.kernels.cpp import library
from attnres_serve.kernels.interface import BackendError, BankSlot, SiteWeights

IN_PLACE: Final = True

Answers = tuple[Tensor, Tensor]  # [S, T, d] in the activation dtype, log-sum-exps [S, T] float32
_ops = torch.ops.attnres_serve
_ready = False  # whether the operators are loaded
_dtypes: set[torch.dtype] = set()  # whose kernels are
_use: Any = None  # hands kernels to the loaded operators
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def prepare(dtype: torch.dtype | None = None) -> None:
    """Load the operators into torch, compiling them first if this machine has not yet.

    The compiled libraries are kept in ``~/.cache/attnres_serve``
    (``$XDG_CACHE_HOME/attnres_serve``), and existing ones are used, even if that folder is
    read-only.

    Args:
        dtype: of the activations; None for all that there are kernels for.

    Raises:
        BackendError: there is no C++ compiler, it failed, the cache cannot be written, or there are
            no kernels for the dtype.
    """
    _load(DTYPES if dtype is None else (dtype,))


def _load(dtypes: Sequence[torch.dtype]) -> None:
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise BackendError(
                f"the C++ backend has no code for {_name(dtype)}; choose float32, float16 or "
                "bfloat16, or the torch backend."
            )
    try:
        _load_operators()
        for dtype in dtypes:
            _load_kernels(dtype)
    except OSError as error:
        raise BackendError(
            f"the C++ backend has no place for its library ({error}); set XDG_CACHE_HOME to a "
            "folder that can be written, or choose the torch backend."
        ) from error


def _load_operators() -> None:
    global _ready, _use
    if not _ready:
        compiled = library.load()
        _register_fakes()
        cpp_direct.install(compiled)
        _use = ctypes.CDLL(str(compiled)).attnres_serve_use
        _ready = True


def _load_kernels(dtype: torch.dtype) -> None:
    if dtype not in _dtypes:
        kernels = ctypes.CDLL(str(library.load(_name(dtype)))).attnres_serve_kernels
        kernels.restype = ctypes.c_void_p
        _use(ctypes.c_int64(cpp_direct.DTYPES[dtype]), ctypes.c_void_p(kernels()))
        _dtypes.add(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_ready(dtype: torch.dtype | None = None) -> bool:
    """Whether the operators are loaded, and the kernels of a dtype; the recurrence needs none."""
    return _ready and (dtype is None or dtype in _dtypes)


def problem(dtype: torch.dtype | None = None) -> str | None:
    """Load what ``is_ready`` asks for; ``recurrence`` and ``experts`` can run in plain torch too.

    Returns:
        A sentence that says why there is no C++, or None.
    """
    try:
        _load(() if dtype is None else (dtype,))
    except BackendError as error:
        return str(error)
    return None


def queries_of(sites: Sequence[SiteWeights]) -> Sequence[SiteWeights]:
    return sites


def single_pass(
    delta: Tensor,
    bank: Tensor,
    queries: Sequence[SiteWeights],
    site: SiteWeights,
    slot: BankSlot,
) -> Tensor:
    _ops.cpp_single_pass(delta, bank, *arguments(site, slot))
    return delta


def phase_1(
    delta: Tensor,
    bank: Tensor,
    queries: Sequence[SiteWeights],
    count: int,
    site: SiteWeights,
    slot: BankSlot,
    completes: bool,
) -> tuple[Tensor, Answers]:
    group = queries[slot.position : slot.position + count]
    packed_slot, eps = numbers(site, slot)
    later = count - 1
    answers = bank.new_empty((later, *delta.shape))
    log_sums = bank.new_empty((later, delta.shape[0]), dtype=torch.float32)
    _ops.cpp_phase_1(
        delta,
        bank,
        answers,
        log_sums,
        packed_slot,
        eps,
        completes,
        [one.query for one in group],
        [one.key_norm for one in group],
        None if site.bias is None else [one.bias for one in group],
        site.norm_weight,
    )
    return delta, (answers, log_sums)


def phase_2(
    delta: Tensor,
    bank: Tensor,
    answers: Answers,
    queries: Sequence[SiteWeights],
    site: SiteWeights,
    slot: BankSlot,
) -> Tensor:
    answer, log_sums = answers
    _ops.cpp_phase_2(delta, bank, answer, log_sums, slot.number, slot.first, *arguments(site, slot))
    return delta


def add_to_row(delta: Tensor, bank: Tensor, row: int) -> None:
    _ops.cpp_add_to_row(delta, bank, row)


def arguments(
    site: SiteWeights, slot: BankSlot
) -> tuple[int, int, Tensor, Tensor, Tensor | None, Tensor]:
    """The last six arguments of an operator that runs one site."""
    return *numbers(site, slot), site.query, site.key_norm, site.bias, site.norm_weight


def numbers(site: SiteWeights, slot: BankSlot) -> tuple[int, int]:
    """``Numbers`` of the C++ code: five as two, of two times 32 bits each."""
    constants = float(site.logit_scale), float(site.key_eps), float(site.norm_eps)
    packed: tuple[int, int] = _packed(2 * slot.row + slot.fresh, *constants)
    return packed


@torch.compiler.assume_constant_result
def _packed(slot: int, logit_scale: float, key_eps: float, norm_eps: float) -> tuple[int, int]:
    (packed_slot,) = struct.unpack("<q", struct.pack("<if", slot, logit_scale))
    (eps,) = struct.unpack("<q", struct.pack("<ff", norm_eps, key_eps))
    return packed_slot, eps


def _register_fakes() -> None:
    """What the operators return, for compilers: nothing."""
    nothing = ("single_pass", "phase_1", "phase_2", "add_to_row", "recurrence", "situ_experts")
    for name in nothing:
        torch.library.register_fake(f"attnres_serve::cpp_{name}", lambda *_: None)
