"""Compiled graphs call the cpp backend's single pass directly, past torch's dispatcher.

In decode, with the caches full of other weights, the dispatcher's way to an operator (its arguments
boxed, every size and stride asked for) costs three times as much as the site's work.  A compiler
knows dtypes and sizes, so the code that inductor generates hands over tensors as they are, the
number of tokens and three constants, to a builtin function that reads addresses only: as inductor
calls its own loops.  What cannot be called so is called as the operator.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_serve.kernels import fingerprint

NAME = "attnres_serve::cpp_single_pass"
OPERATOR = "torch.ops.attnres_serve.cpp_single_pass.default"
TORCH = "2.13."  # what is used of inductor here is not public: others call the operator
ENTRY = "attnres_serve_direct"
DTYPES = {torch.float32: 6, torch.float16: 5, torch.bfloat16: 15}  # numbers of c10::ScalarType


def _by_operator(
    x: Tensor,
    bank: Tensor,
    query: Tensor,
    key_norm: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    tokens: int,
    layout: int,
    place: int,
    eps: int,
) -> None:
    """What ``single_pass`` does, where code was generated elsewhere and cannot be called here."""
    torch.ops.attnres_serve.cpp_single_pass(x, bank, place, eps, query, key_norm, bias, norm_weight)


single_pass: Callable[..., None] = _by_operator
recorded: Any = torch._C._profiler._RecordFunctionFast(NAME)  # type: ignore[attr-defined]


def install(library: Path) -> None:
    """Let inductor generate direct calls, where this torch and this library can.

    Args:
        library: the compiled backend, which is loaded.
    """
    global single_pass
    if not torch.__version__.startswith(TORCH):
        return
    try:
        from torch._inductor.codegen import custom_extern_kernel_codegen as custom

        address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        make = getattr(ctypes.PyDLL(str(library)), ENTRY)
    except AttributeError:  # compiled without Python's headers
        return
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p]
    single_pass = make(address)
    custom.CUSTOM_EXTERN_KERNEL_CODEGEN[OPERATOR] = custom.CustomCodegen(python=_write_call)
    torch.compiler.config.cache_key_tag += fingerprint.source()


def layout(hidden: int, slots: int, dtype: torch.dtype, norm_dtype: torch.dtype) -> int:
    """The sizes and dtypes of a contiguous bank and ``x``, as one number for ``single_pass``."""
    return hidden | slots << 32 | DTYPES[dtype] << 48 | DTYPES[norm_dtype] << 56


def _write_call(node: Any, writeline: Callable[[str], None]) -> None:
    """Generate the call of one site; ``node`` is inductor's."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    arguments = node.codegen_args()
    given, _ = node.unflatten_args(node.inputs, node.constant_args)
    if not _fits(*given):
        writeline(f"{OPERATOR}({', '.join(arguments)})")
        return
    wrapper = V.graph.wrapper_code
    wrapper.add_import_once(
        f"from {__name__} import recorded as attnres_recorded, single_pass as attnres_single_pass"
    )
    (tokens, hidden), slots = given[0].get_size(), given[1].get_size()[1]
    known = layout(int(hidden), int(slots), given[0].get_dtype(), given[-1].get_dtype())
    x, bank, place, eps, *learned = arguments
    numbers = wrapper.codegen_sizevar(tokens), str(known), place, eps
    scope = "with attnres_recorded: " if config.cpp.enable_kernel_profile else ""
    writeline(f"{scope}attnres_single_pass({', '.join((x, bank, *learned, *numbers))})")


def _fits(
    x: Any, bank: Any, place: Any, eps: Any, query: Any, key_norm: Any, bias: Any, norm_weight: Any
) -> bool:
    """Whether the arguments, inductor's, lie as ``single_pass`` reads them."""
    from sympy import Integer

    tokens, hidden = x.get_size()
    slots = bank.get_size()[1]
    learned = query, key_norm, norm_weight
    return (
        x.get_device() == bank.get_device() == torch.device("cpu")
        and isinstance(hidden, Integer)
        and isinstance(slots, Integer)
        and slots < 2**16
        and list(x.get_stride()) == [hidden, 1]
        and list(bank.get_size()) == [tokens, slots, hidden]
        and list(bank.get_stride()) == [slots * hidden, hidden, 1]
        and x.get_dtype() == bank.get_dtype()
        and all(list(vector.get_size()) == [hidden] for vector in learned)
        and all(list(vector.get_stride()) == [1] for vector in learned)
        and {query.get_dtype(), key_norm.get_dtype()} == {torch.float32}
        and (bias is None or (list(bias.get_size()) == [1] and bias.get_dtype() == torch.float32))
        and {x.get_dtype(), norm_weight.get_dtype()} <= DTYPES.keys()
    )
