"""vLLM's kernel as a contender: the inputs of a cell in the layout that it is made for.

It is used as it is.  Nothing is copied from one layout to another in a measured call.  Where there
is no vLLM, it is reported as absent.
"""

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from attnres_serve.compat import versions
from benchmarks.kernels.cells import KEY_EPS, NORM_EPS, Inputs
from benchmarks.kernels.contenders import Contender, Run

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

    calls = [lambda index=index: site(index) for index in range(cell.sites)]
    return Run(calls, lambda: rows["now"], reset, poison=(bank[:, -1],))


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


def find(vllm_file: Path | None) -> tuple[dict[str, Contender], dict[str, str], dict[str, str]]:
    """vLLM's kernel, if it is here; nothing of it is imported before it is used.

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
    )
    name = "vllm_kimi_k3"
    if vllm_file is not None:
        return {name: vllm}, {name: f"the file {vllm_file.name}"}, {}
    if importlib.util.find_spec("vllm") is None:
        return {}, {}, {name: "vllm is not installed, and --vllm-file names no file of it."}
    return {name: vllm}, {name: " ".join(("installed", *versions.installed()))}, {}
