"""The cpp backend: vectorised C++ on CPU, compiled once by the machine's own compiler.

Each function is an operator of torch's, opaque to a compiler: no kernel per number of sources is
generated, and a site costs one call.  ``backends`` describes the functions, ``cpp_backend.cpp`` is
their code.
"""

import hashlib
import os
import platform
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from attnres_serve.kernels import torch_path
from attnres_serve.kernels.backends import BackendError, SiteWeights

SOURCE = Path(__file__).with_name("cpp_backend.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20")

Answers = tuple[Tensor, Tensor]  # [S, T, d] and log-sum-exps [S, T], float32
_ops = torch.ops.attnres_serve


def prepare() -> None:
    """Load the operators into torch, compiling them first where this machine has not yet.

    The compiled library is kept in ``~/.cache/attnres_serve`` (``$XDG_CACHE_HOME/attnres_serve``).

    Raises:
        BackendError: there is no C++ compiler, or it failed.
    """
    if hasattr(_ops, "mix_norm"):
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = folder / "attnres_serve" / f"cpp_backend-{_fingerprint()}.so"
    if not library.exists():
        _compile(library)
    torch.ops.load_library(str(library))
    _register_fakes()


def single_pass(
    blocks: Sequence[Tensor], partial: Tensor | None, delta: Tensor, weights: SiteWeights
) -> tuple[Tensor, Tensor]:
    if partial is None:
        return _ops.mix_norm((*blocks, delta), *weights), delta
    return _ops.add_mix_norm(blocks, partial, delta, *weights)


def inter_block(blocks: Sequence[Tensor], sites: Sequence[SiteWeights]) -> Answers:
    queries, key_norms = [site.query for site in sites], [site.key_norm for site in sites]
    scale, eps = sites[0].logit_scale, sites[0].key_eps
    return _ops.inter_block(blocks, queries, key_norms, scale, eps)


def norm_answer(answers: Answers, position: int, weights: SiteWeights, like: Tensor) -> Tensor:
    answer = answers[0][position]
    return torch_path.rms_norm(answer, weights.norm_weight, weights.norm_eps, like.dtype)


def merge(
    answers: Answers, position: int, partial: Tensor | None, delta: Tensor, weights: SiteWeights
) -> tuple[Tensor, Tensor]:
    if partial is None:
        return _ops.merge_norm(*answers, position, delta, *weights), delta
    return _ops.add_merge_norm(*answers, position, partial, delta, *weights)


def _register_fakes() -> None:
    """What the operators return, for compilers: shapes and dtypes without values."""

    @torch.library.register_fake("attnres_serve::mix_norm")
    def _(sources, *_):
        return _like(sources[-1])

    @torch.library.register_fake("attnres_serve::add_mix_norm")
    def _(blocks, partial, delta, *_):
        return _like(delta), _like(delta)

    @torch.library.register_fake("attnres_serve::inter_block")
    def _(blocks, queries, *_):
        tokens, hidden = blocks[0].shape
        shape = (len(queries), tokens, hidden)
        answers = blocks[0].new_empty(shape, dtype=torch.float32)
        return answers, blocks[0].new_empty(shape[:2], dtype=torch.float32)

    @torch.library.register_fake("attnres_serve::merge_norm")
    def _(answers, log_sums, position, own, *_):
        return _like(own)

    @torch.library.register_fake("attnres_serve::add_merge_norm")
    def _(answers, log_sums, position, partial, delta, *_):
        return _like(delta), _like(delta)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _fingerprint() -> str:
    """Source, flags, torch and processor: what the compiled library depends on."""
    parts = [SOURCE.read_text(), *FLAGS, torch.__version__, platform.machine()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():  # -march=native: a cache shared by machines holds a library for each kind
        lines = cpuinfo.read_text().splitlines()
        parts += sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(library: Path) -> None:
    """Compile into a folder beside the library and move it there in one step."""
    from torch.utils import cpp_extension

    path = os.environ.get("PATH", "")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as build:
            # The loader looks for ninja on the path, where a virtual environment need not be.
            os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{path}"
            cpp_extension.load(
                library.stem,
                [str(SOURCE)],
                extra_cflags=list(FLAGS),
                build_directory=build,
                is_python_module=False,
            )
            os.replace(Path(build) / library.name, library)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BackendError(
            f"the C++ backend could not be compiled ({reason}); install a C++ compiler such as "
            "g++, or choose the torch backend."
        ) from error
    finally:
        os.environ["PATH"] = path
