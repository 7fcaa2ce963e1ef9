"""Serve a checkpoint in this process: vLLM's model and loader, without an engine or a KV cache.

Attention is computed here, from what vLLM's layer holds (scale, heads, window, causal or not), so
that a tiny checkpoint costs some hundredths of a second.  ``with_caches`` is for vLLM's own.
"""

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import AttentionType
from vllm.v1.worker.utils import AttentionGroup

from attnres_serve import plugin
from attnres_serve.compat.workarounds.amx import permit_amx


def vllm_config(folder: Path, **options: Any) -> VllmConfig:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "additional_config": {"attnres_backend": "torch"},
    }
    return EngineArgs(model=str(folder), **defaults | options).create_engine_config()


def attend(self: Attention, query: Tensor, key: Tensor, value: Tensor, *_) -> Tensor:
    """Instead of ``Attention.forward``, for one sequence from its beginning."""
    tokens, group = len(query), self.num_heads // self.num_kv_heads
    q = query.view(tokens, self.num_heads, -1)
    k, v = (x.view(tokens, self.num_kv_heads, -1).repeat_interleave(group, 1) for x in (key, value))
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    hidden = torch.zeros_like(age, dtype=torch.bool)
    if self.attn_type == AttentionType.DECODER:
        hidden |= age < 0
    if self.sliding_window is not None:
        hidden |= age >= self.sliding_window
    scores = torch.einsum("qhd,khd->hqk", q, k) * self.impl.scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@contextmanager
def world(any_checkpoint: Path) -> Iterator[None]:
    """A world of one process and one thread."""
    plugin.register()
    permit_amx()  # which vLLM's worker does
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with set_current_vllm_config(vllm_config(any_checkpoint)):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    cleanup_dist_env_and_memory()


def load(config: VllmConfig) -> torch.nn.Module:
    """The model of a configuration, as a worker of vLLM's has it."""
    with (
        set_current_vllm_config(config),
        set_default_torch_dtype(config.model_config.dtype),
        torch.inference_mode(),
    ):
        model = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(model, config.model_config)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model


def with_caches(config: VllmConfig, blocks: int) -> list[list[AttentionGroup]]:
    """Give the layers of a model caches, as a model runner does; its ``attn_groups``."""
    groups = []
    for name, layer in config.compilation_config.static_forward_context.items():
        spec, backend = layer.get_kv_cache_spec(config), layer.get_attn_backend()
        group = AttentionGroup(backend, [name], spec, len(groups))
        group.create_metadata_builders(config, torch.device("cpu"))
        shape = blocks, spec.num_kv_heads, spec.block_size, 2 * spec.head_size
        layer.bind_kv_cache(torch.full(shape, torch.nan, dtype=spec.dtype))
        groups.append([group])
    return groups


def serve(folder: Path, ids: Sequence[int], **options: Any) -> Tensor:
    """Logprobs ``[tokens, vocabulary]`` of the token after each position, float32.

    Args:
        folder: the checkpoint.
        ids: a prompt.
        options: as of ``vllm_config``.
    """
    config = vllm_config(folder, **options)
    model = load(config)
    with (
        pytest.MonkeyPatch.context() as patch,
        set_current_vllm_config(config),
        torch.inference_mode(),
        set_forward_context(None, config),
    ):
        patch.setattr(Attention, "forward", lambda *args, **_: attend(*args).flatten(1))
        hidden = model(torch.tensor(ids), torch.arange(len(ids)))
        return model.compute_logits(hidden).log_softmax(-1)
