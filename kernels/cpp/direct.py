"""Compiled graphs call the cpp backend's sites directly, past torch's dispatcher.

In decode, with the caches full of other weights, the dispatcher costs three times as much as the
site's work: it boxes the arguments and reads every size and stride.  A compiler knows dtypes and
sizes.  So the code that inductor generates passes the operator's arguments as they are, followed by
the number of tokens and the layout, to a builtin function that reads addresses only, as inductor
calls its loops.  A site that cannot be called so is called as the operator.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from attnres_serve.kernels import fingerprint

NAMES = ("single_pass", "phase_1", "phase_2")  # in the order of direct.h
TORCH = "2.13."  # what is used of inductor here is not public: others call the operator
ENTRY = "attnres_serve_direct"
DTYPES = {torch.float32: 6, torch.float16: 5, torch.bfloat16: 15}  # numbers of c10::ScalarType


def operator(name: str) -> str:
    """How code calls the operator."""
    return f"torch.ops.attnres_serve.cpp_{name}.default"


def _by_operator(name: str, *arguments: Any) -> None:
    """The direct call in a process that loads code generated elsewhere and has none itself."""
    getattr(torch.ops.attnres_serve, f"cpp_{name}")(*arguments[:-2])


problem: str | None = None  # why compiled graphs call the operators instead, in a sentence
calls: dict[str, Callable[..., None]] = {name: partial(_by_operator, name) for name in NAMES}
recorded: dict[str, Any] = {
    name: torch._C._profiler._RecordFunctionFast(f"attnres_serve::cpp_{name}")  # type: ignore[attr-defined]
    for name in NAMES
}


def install(library: Path) -> None:
    """Let inductor generate direct calls, or set ``problem``.

    Args:
        library: the compiled backend, which is loaded.
    """
    global problem
    if not torch.__version__.startswith(TORCH):
        problem = f"direct calls are for torch {TORCH[:-1]}, and this is {torch.__version__}."
        return
    try:
        from torch._inductor.codegen import custom_extern_kernel_codegen as custom

        address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
        make = getattr(ctypes.PyDLL(str(library)), ENTRY)
    except AttributeError:
        problem = "the cpp backend was compiled without Python's headers."
        return
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p]
    calls.update(zip(NAMES, make(address), strict=True))
    for name in NAMES:
        write = partial(_write_call, name)
        custom.CUSTOM_EXTERN_KERNEL_CODEGEN[operator(name)] = custom.CustomCodegen(python=write)
    torch.compiler.config.cache_key_tag += fingerprint.source()


def layout(hidden: int, slots: int, dtype: torch.dtype, norm_dtype: torch.dtype) -> int:
    """The sizes and dtypes of a contiguous bank and ``x``, as one number for a direct call."""
    return hidden | slots << 32 | DTYPES[dtype] << 48 | DTYPES[norm_dtype] << 56


def _write_call(name: str, node: Any, writeline: Callable[[str], None]) -> None:
    """Generate the call of one site; ``node`` is inductor's."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    arguments = node.codegen_args()
    values, _ = node.unflatten_args(node.inputs, node.constant_args)
    names = [one.name for one in node.op_overload._schema.arguments]
    by_name = dict(zip(names, values, strict=True))
    if not _fits(by_name):
        writeline(f"{operator(name)}({', '.join(arguments)})")
        return
    x, bank = by_name["x"], by_name["bank"]
    (tokens, hidden), slots = x.get_size(), bank.get_size()[1]
    known = layout(int(hidden), int(slots), x.get_dtype(), by_name["norm_weight"].get_dtype())
    wrapper, function = V.graph.wrapper_code, f"attnres_{name}"
    wrapper.add_import_once(f"from {__name__} import calls as attnres_calls")
    wrapper.add_import_once(f"from {__name__} import recorded as attnres_recorded")
    wrapper.add_import_once(
        f"{function}, {function}_seen = attnres_calls['{name}'], attnres_recorded['{name}']"
    )
    numbers = wrapper.codegen_sizevar(tokens), str(known)
    scope = f"with {function}_seen: " if config.cpp.enable_kernel_profile else ""
    writeline(f"{scope}{function}({', '.join((*arguments, *numbers))})")


def _fits(by_name: dict[str, Any]) -> bool:
    """Whether a direct call can read the arguments of an operator, inductor's by their names."""
    from sympy import Integer

    x, bank, norm_weight = (by_name[name] for name in ("x", "bank", "norm_weight"))
    tokens, hidden = x.get_size()
    slots = bank.get_size()[1]
    one = "query" in by_name
    keys = (
        (by_name["query"], by_name["key_norm"])
        if one
        else (*by_name["queries"], *by_name["key_norms"])
    )
    biases = [by_name["bias"]] if by_name.get("bias") is not None else by_name.get("biases") or []
    return (
        x.get_device() == bank.get_device() == torch.device("cpu")
        and isinstance(hidden, Integer)
        and isinstance(slots, Integer)
        and slots < 2**16
        and _dense(x, tokens, hidden)
        and _dense(bank, tokens, slots, hidden)
        and x.get_dtype() == bank.get_dtype()
        and all(_dense(vector, hidden) for vector in (*keys, norm_weight))
        and {key.get_dtype() for key in keys} == {torch.float32}
        and len(biases) in (0, len(keys) // 2)
        and all(_bias_fits(bias, by_name["slot"]) for bias in biases)
        and {x.get_dtype(), norm_weight.get_dtype()} <= DTYPES.keys()
        and ("answers" not in by_name or _answers_fit(by_name, tokens, hidden))
    )


def _bias_fits(bias: Any, slot: int) -> bool:
    """Whether a bias has a number for each row up to that of ``Numbers``."""
    rows, read = bias.get_size()[0], (slot & 0xFFFFFFFF) // 2 + 1
    return bool(rows >= read and _dense(bias, rows) and bias.get_dtype() == torch.float32)


def _answers_fit(by_name: dict[str, Any], tokens: Any, hidden: Any) -> bool:
    """Whether answers and log-sum-exps are those of this batch and group."""
    answers, log_sums = by_name["answers"], by_name["log_sums"]
    sites = answers.get_size()[0]
    if "queries" in by_name:
        known = sites == len(by_name["queries"]) - 1 == len(by_name["key_norms"]) - 1
    else:
        known = 0 <= by_name["position"] < sites
    return bool(
        known
        and _dense(answers, sites, tokens, hidden)
        and _dense(log_sums, sites, tokens)
        and answers.get_dtype() == by_name["x"].get_dtype()
        and log_sums.get_dtype() == torch.float32
    )


def _dense(tensor: Any, *shape: Any) -> bool:
    """Whether inductor's tensor has this shape and is contiguous."""
    strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
    return list(tensor.get_size()) == list(shape) and list(tensor.get_stride()) == strides
