"""LoRA adapters of which vLLM would silently skip a part.

The files of an adapter are checked first (``lora.files``).  vLLM 0.32 only checks that the model
has some layer with a tensor's last name.  It skips tensors that reach no layer: one of a layer
number that the model does not have, one that ``--lora-target-modules`` excludes, one without a
fitting wrapper, one of a layer that runs under a second name (``shared_expert_gate`` of Qwen2-MoE
and Qwen3-Next is their experts' ``expert_gate``).  An adapter of ``kv_b_proj`` in latent attention
changes nothing on a CPU, and at most the prefill on a GPU, because the weight is folded into others
at load.  Adapters of ``q_proj`` and ``k_proj`` in Llama 4 are added in the row order before vLLM's
reordering for its rotary embedding.

Remove this with a vLLM whose ``WorkerLoRAManager._load_adapter`` raises for all of these.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from attnres_serve.compat import decoder
from attnres_serve.compat.patch import Patch
from attnres_serve.compat.workarounds import adapters_again
from attnres_serve.errors import SettingError
from attnres_serve.families import experts
from attnres_serve.lora import files, refusals

UNAPPLIED = (
    "changes {}, to which vLLM applies no adapter in this model; name the layer in "
    "--lora-target-modules if that is given, and otherwise merge the adapter into the weights."
)


def _requiring_whole(original: Any) -> Any:
    """Refuse an adapter that an AttnRes model cannot apply whole.

    Other models in this process are not affected.
    """
    from vllm.lora.utils import get_adapter_absolute_path

    def _load_adapter(self, lora_request):
        base = getattr(self._adapter_manager.model, "attn_res_base", None)
        if base is None:
            return original(self, lora_request)
        folder = Path(get_adapter_absolute_path(lora_request.lora_path))
        with adapters_again.loading(self, lora_request, folder):
            return whole(self, lora_request, folder, base)

    def whole(self, lora_request, folder, base):
        manager = self._adapter_manager
        reason, adapter = None, None
        if folder.is_dir():  # vLLM reports a missing one
            reason = files.problem(folder, _described(self, base.needed))
        if reason is None:
            try:
                adapter = original(self, lora_request)
            except (ValueError, RuntimeError) as error:
                reason = _in_one_sentence(str(error))
            else:
                reason = problem(adapter.loras, manager, base.reordered)
        if reason is not None:
            raise SettingError(f"{refusals.name_of(lora_request.lora_name)} {reason}")
        return adapter

    return _load_adapter


def _in_one_sentence(reason: str) -> str:
    """vLLM's error about an adapter, as the end of a sentence."""
    unexpected = re.search(r"but received \['([^']+)'", reason)
    if unexpected:
        return UNAPPLIED.format(unexpected[1])
    return (
        f"cannot be loaded ({reason.partition(chr(10))[0].rstrip('.')}); merge it into the weights."
    )


def _described(worker: Any, needed: Mapping[str, files.Shape]) -> files.Model:
    """The facts about a worker's model; adapters may use vLLM's names of layers."""
    model, config = worker._adapter_manager.model, worker.lora_config
    by_vllm = _by_names_of_vllm(model, needed)
    return files.Model(
        weight_shapes={**needed, **{f"{name}.weight": shape for name, shape in by_vllm.items()}},
        max_rank=config.max_lora_rank,
        has_table=lambda leaf, table: _has_table(model, leaf, table),
        dtype=config.lora_dtype,
    )


def _has_table(model: Any, leaf: str, table: Any) -> bool:
    """Whether a table equals the served rows of this worker."""
    import torch

    # A tied head is the embedding under another name.
    every = model.named_modules(remove_duplicate=False)
    wrapped = next((module for name, module in every if name.rpartition(".")[2] == leaf), None)
    layer = getattr(wrapped, "base_layer", wrapped)
    if layer is None or decoder.is_elsewhere(layer):
        return layer is not None
    rows, weight = layer.shard_indices, layer.weight
    first, last = rows.org_vocab_start_index, rows.org_vocab_end_index
    if table.shape != (layer.org_vocab_size, weight.shape[-1]) or not weight.is_floating_point():
        return False
    return torch.equal(table[first:last].to(weight), weight[: last - first])


def problem(layers: Collection[str], manager: Any, reordered: tuple[str, ...] = ()) -> str | None:
    """The reason why a model cannot apply an adapter whole, as the end of a sentence; or None.

    Args:
        layers: the layers that it changes, by vLLM's names.
        manager: vLLM's ``LoRAModelManager``, which has the layers with adapters.
        reordered: layers of the model, see ``Family.reordered``.
    """
    read, altered = _read(manager), _altered(manager.model, reordered)
    for name in layers:
        if not decoder.is_on_this_stage(manager.model, name):
            continue
        if how := altered.get(name.rpartition(".")[2]):
            return (
                f"changes {name}, which vLLM {how} when it loads the model, and the adapter would "
                "not fit it; train it without that layer, or merge it into the weights."
            )
        if not _is_read(name, read):
            return UNAPPLIED.format(name)
    return None


def _by_names_of_vllm(model: Any, needed: Mapping[str, files.Shape]) -> dict[str, files.Shape]:
    """Shapes of weights by vLLM's names, before fusing."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        rename = str
    else:  # an older mapper renames itself
        rename = getattr(mapper, "get_rename_mapper", lambda: mapper)()._map_name
    stems = {name.removesuffix(".weight"): shape for name, shape in needed.items()}
    return {rename(stem): shape for stem, shape in stems.items()}


def _read(manager: Any) -> set[str]:
    """Names of the layers with adapters, and of the layers fused into them."""
    from vllm.lora.layers import BaseLayerWithLoRA

    held = {
        id(child)
        for module in manager.model.modules()
        if not isinstance(module, BaseLayerWithLoRA)
        for child in module.children()
    }
    # A layer that a module still holds without its wrapper runs without the adapter.
    whole = [name for name, layer in manager.modules.items() if id(layer.base_layer) not in held]
    return {*whole}.union(*(manager.packed_modules.get(name, ()) for name in whole))


def _is_read(name: str, read: Collection[str]) -> bool:
    return name in read or experts.mixture_of(name) in read


def _altered(model: Any, reordered: tuple[str, ...]) -> dict[str, str]:
    """vLLM's changes of weights at load, by layer."""
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    altered = dict.fromkeys(reordered, "gives another order of rows")
    if "MLAAttention" in classes:
        altered["kv_b_proj"] = "folds into other weights"
    return altered


PATCH = Patch(
    targets=("vllm.lora.worker_manager:WorkerLoRAManager._load_adapter",),
    make=_requiring_whole,
    why="parts of an adapter were left out silently",
    models="AttnRes models with `--enable-lora`",
    first=(0, 28),
    report="lora-left-out",
)
