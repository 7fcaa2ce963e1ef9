"""vLLM's piecewise compilation, which is CUDA's, on the CPU: a graph between two attentions is a
piece, and equal pieces share an artifact."""

import functools
from typing import NamedTuple

from torch._inductor.graph import GraphLowering
from vllm.compilation.backends import VllmBackend
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode, VllmConfig
from vllm.platforms.cpu import CpuPlatform


class Compiled(NamedTuple):
    """What was compiled since ``as_on_cuda``.

    Attributes:
        pieces: the pieces of each model that was compiled.
        artifacts: how many artifacts those had in the end.
        code: generated for them.
    """

    pieces: list[int]
    artifacts: list[int]
    code: list[str]


@functools.cache
def as_on_cuda() -> Compiled:
    """Compile in pieces from now on, where ``mode`` of the configuration says so."""
    compiled = Compiled([], [], [])
    check = CpuPlatform.check_and_update_config.__func__
    collect = VllmBackend.collect_standalone_compile_artifacts

    def keep_mode(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        config = vllm_config.compilation_config
        asked = config.mode
        check(cls, vllm_config)
        if asked == CompilationMode.VLLM_COMPILE:
            config.mode, config.compile_sizes = asked, []
            config.ir_enable_torch_wrap = True

    def count(self: VllmBackend) -> object:
        found = collect(self)
        compiled.pieces.append(found[0].num_entries())
        compiled.artifacts.append(found[0].num_artifacts())
        return found

    CpuPlatform.check_and_update_config = classmethod(keep_mode)
    VllmBackend.collect_standalone_compile_artifacts = count
    GraphLowering.save_output_code = compiled.code.append
    # It asks for operators that vLLM has on CUDA alone.
    FixFunctionalizationPass.__call__ = lambda self, graph: None
    return compiled
