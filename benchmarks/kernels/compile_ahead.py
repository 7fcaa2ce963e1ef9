"""Compile the Triton kernels ahead of time, without a GPU: registers, spills, access widths.

    python -m benchmarks.kernels.compile_ahead --arch 80 90 --hidden 1024 7168 --dtype bfloat16
    python -m benchmarks.kernels.compile_ahead --kernel single_pass --hidden 7168

Arguments are specialised by Triton's binder from aligned tensors, so the binaries are those a
launch would compile.  The only line on stdout is one JSON document; per kernel it holds

* ``binaries`` needed for all numbers of sources, sites and tokens: 1 unless a launch can compile
  during a request,
* ``registers`` per thread, ``shared_bytes`` and ``programs_per_sm`` that fit the register file,
* ``spill_bytes`` (stack per thread) and ``local_accesses`` (instructions that touch it),
* ``starts_early``: whether the launch asks for it, the ``grid_control`` instructions of the kernel,
  and its ``accesses_before_wait``,
* ``loop_instructions``: of each loop, in the order of the code,
* ``loads`` and ``stores``: bits of an access to global memory -> how many such instructions,
* ``narrow_strides``: those passed in 32 bits, in which a row's offset may not fit.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from attnres_serve.kernels.triton import (
    common,
    mix_group,
    phase_1,
    phase_2,
    score_group,
    single_pass,
)
from attnres_serve.kernels.triton.phase_1 import Least

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in common.DTYPES}
# Values that Triton would tell apart in an argument that it specialises.
ROWS = (0, 1, 3, 16)
SIZES = ((1, 1, 1), (2, 3, 2), (16, 16, 16), (33, 24, 9))  # tokens, sites, finished blocks
EPS = {"key_eps": 1e-6, "norm_eps": 1e-6}
KERNELS: dict[str, tuple[ModuleType, str]] = {
    "single_pass": (single_pass, "site_kernel"),
    "single_pass_few": (single_pass, "site_kernel"),
    "phase_1": (phase_1, "phase_1_kernel"),
    "score_group": (score_group, "score_group_kernel"),
    "score_group_few": (score_group, "score_group_kernel"),
    "score_group_most": (score_group, "score_group_kernel"),
    "weigh_group": (mix_group, "weigh_group_kernel"),
    "mix_group": (mix_group, "mix_group_kernel"),
    "phase_2": (single_pass, "site_kernel"),
    "phase_2_rows": (single_pass, "site_kernel"),
    "phase_2_rows_few": (single_pass, "site_kernel"),
}
# Those that may begin a block.
BEGINNING = (
    *("single_pass", "single_pass_few", "phase_1"),
    *("score_group", "score_group_few", "score_group_most"),
    *("phase_2", "phase_2_rows", "phase_2_rows_few"),
)
# Sites of those that are compiled for one number of them.
SITES = {"score_group_few": 16, "score_group_most": score_group.MAX_SITES}
REGISTER_FILE = 65536  # 32-bit registers of an SM, sm_80 to sm_120
# Of an SM; a program takes a KiB more than it asks for.
SHARED_MEMORY = {80: 164 << 10, 89: 100 << 10, 90: 228 << 10, 100: 228 << 10, 120: 100 << 10}
ACCESS = re.compile(r"\b(ld|st)\.global((?:\.[\w:]+)*)")


def specialise(
    kernel: JITFunction, arguments: dict[str, Any], arch: int
) -> tuple[ASTSource, GPUTarget, dict[str, Any]]:
    """Source, target and options that launching ``kernel`` on ``sm_<arch>`` would compile.

    Args:
        kernel: a Triton kernel, not interpreted.
        arguments: its arguments and launch options; meta tensors count as aligned to 16 bytes.
        arch: compute capability times ten.
    """
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, options = bind(**arguments)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialisation, options
    )
    return ASTSource(kernel, signature, constants, attributes), target, parsed.__dict__


def access_widths(ptx: str, kind: str) -> dict[str, int]:
    """Count the accesses to global memory by width in bits; ``kind`` is ``ld`` or ``st``."""
    widths: Counter[int] = Counter()
    for access, qualifiers in ACCESS.findall(ptx):
        if access == kind:
            vector = re.search(r"\.v(\d+)", qualifiers)
            bits = int(re.search(r"\.[bufs](\d+)$", qualifiers)[1])
            widths[bits * (int(vector[1]) if vector else 1)] += 1
    return {str(width): widths[width] for width in sorted(widths, reverse=True)}


def _cuobjdump(cubin: str, option: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, cubin]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measure(compiled: triton.compiler.CompiledKernel) -> dict[str, Any]:
    """Registers, spills and access widths of a compiled kernel, read from its cubin and PTX."""
    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        with open(cubin, "wb") as file:
            file.write(compiled.asm["cubin"])
        usage = _cuobjdump(cubin, "--dump-resource-usage")
        listing = _cuobjdump(cubin, "--dump-sass")
    registers, stack, local = (
        int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    per_thread = -(-registers // 8) * 8  # allocated in eights
    threads = 32 * compiled.metadata.num_warps
    shared = compiled.metadata.shared
    fit = SHARED_MEMORY[compiled.metadata.target.arch] // (shared + 1024)
    return {
        "registers": registers,
        "programs_per_sm": min(REGISTER_FILE // (per_thread * threads), 2048 // threads, 32, fit),
        "shared_bytes": shared,
        "spill_bytes": stack + local,
        "local_accesses": len(re.findall(r"\b(?:LDL|STL)\b", listing)),
        "starts_early": compiled.metadata.launch_pdl,
        "grid_control": re.findall(r"\bgriddepcontrol\.(\w+)", ptx),
        "accesses_before_wait": _accesses_before_wait(listing),
        "loop_instructions": _loop_lengths(listing),
        "loads": access_widths(ptx, "ld"),
        "stores": access_widths(ptx, "st"),
    }


def _accesses_before_wait(listing: str) -> int | None:
    """Number of accesses to global memory before ``ACQBULK``, the wait; None without a wait."""
    before, wait, _ = listing.partition("ACQBULK")
    return len(re.findall(r"\b(?:LD|ST|LDG|STG|RED|ATOM|ATOMG)\b", before)) if wait else None


INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


def _loop_lengths(listing: str) -> list[int]:
    """Instructions of each loop, with those of loops inside; the endless one at the end is none."""
    instructions = [(int(at, 16), name, rest) for at, name, rest in INSTRUCTION.findall(listing)]
    branches = [
        (at, int(target[1], 16))
        for at, name, rest in instructions
        if name.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", rest))
    ]
    ends = {begin: at for at, begin in branches if begin < at}
    return [sum(begin <= at <= ends[begin] for at, *_ in instructions) for begin in sorted(ends)]


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Recorder:
    """Stands in for a kernel: the arguments of its launches, except of those that only compile."""

    def __init__(self) -> None:
        self.arguments: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **arguments: self.arguments.append(arguments) if all(grid) else None


def launches(
    kernel: str, arch: int, hidden: int, dtype: torch.dtype, fresh: bool
) -> list[dict[str, Any]]:
    """Arguments of launches on dense, aligned tensors, which one binary should serve.

    Args:
        kernel: a name of ``KERNELS``; a site of few tokens has another name and config, and so have
            products of few sites and of the most.
        arch: compute capability times ten.
        fresh: whether a block begins; of the ``BEGINNING`` only.

    Returns:
        No launch of a product in another dtype than bfloat16.
    """
    recorders = {place: Recorder() for place in KERNELS.values()}
    least = Least(logits=1 if KERNELS[kernel][0] in (score_group, mix_group) else 2**62, sites=1)
    with ExitStack() as stack:
        for place, recorder in recorders.items():
            stack.enter_context(patch.object(*place, recorder))
        for module in (common, score_group):
            stack.enter_context(patch.object(module, "capability", lambda _: divmod(arch, 10)))
        stack.enter_context(patch.object(phase_1, "LEAST", {common.MAX_HIDDEN: least}))
        for (tokens, sites, count), row in zip(SIZES, ROWS, strict=True):
            tokens += (not kernel.endswith("_few")) * single_pass.FEW
            rows = row if kernel.startswith("single_pass") else count
            _launch(kernel, tokens, SITES.get(kernel, sites), rows, hidden, dtype, fresh)
    return recorders[KERNELS[kernel]].arguments


def _launch(
    kernel: str, tokens: int, sites: int, row: int, hidden: int, dtype: torch.dtype, fresh: bool
) -> None:
    query, delta = _empty(hidden), _empty(tokens, hidden, dtype=dtype)
    tensors = delta, _empty(tokens, max(ROWS) + 1, hidden, dtype=dtype)
    weight, options = query.to(dtype), {"row": row, "fresh": fresh, **EPS}
    if kernel.startswith("single_pass"):
        single_pass.single_pass(*tensors, query, weight, **options)
    elif kernel.startswith("phase_2"):
        # As ``phase_1`` allocates them.
        answers = _empty(tokens, sites, hidden, dtype=dtype).transpose(0, 1)
        known = answers, _empty(tokens, sites).t(), query, weight
        first = row if kernel == "phase_2" else row // 2
        phase_2.phase_2(*tensors, *known, position=sites - 1, first=first, **options)
    else:  # as in a model whose blocks have several sublayers
        phase_1.phase_1(*tensors, _empty(sites, hidden), weight, completes=not fresh, **options)


def main() -> int:
    """Compile what the command line asks for and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kernel", choices=KERNELS, nargs="+", default=list(KERNELS))
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024, 4096, 7168])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bfloat16"])
    options = parser.parse_args()
    if common.INTERPRETED:
        parser.error("TRITON_INTERPRET is set: there is nothing to compile")

    kernels = []
    for kernel, arch, hidden, dtype in product(
        options.kernel, options.arch, options.hidden, options.dtype
    ):
        for fresh in (False, True) if kernel in BEGINNING else (None,):
            module, name = KERNELS[kernel]
            variants, compiled_kernel = {}, getattr(module, name)
            for arguments in launches(kernel, arch, hidden, DTYPES[dtype], bool(fresh)):
                source, target, launch = specialise(compiled_kernel, arguments, arch)
                variants[source.hash()] = source
            if not variants:
                continue
            compiled = triton.compile(source, target=target, options=launch)
            kernels.append(
                {
                    "kernel": kernel,
                    "arch": f"sm_{arch}",
                    "hidden": hidden,
                    "dtype": dtype,
                    "fresh": fresh,
                    "tile": arguments.get("TILE"),
                    "sites": arguments.get("SITES"),
                    "tokens": arguments.get("TOKENS"),
                    "chunk": arguments.get("CHUNK"),
                    "num_warps": arguments["num_warps"],
                    "binaries": len(variants),
                    "narrow_strides": [
                        name
                        for name, kind in source.signature.items()
                        if name.endswith("stride") and kind == "i32"
                    ],
                    **measure(compiled),
                }
            )
    print(json.dumps({"triton": triton.__version__, "kernels": kernels}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
