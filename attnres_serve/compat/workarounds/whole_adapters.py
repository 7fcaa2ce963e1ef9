"""LoRA adapters of which vLLM would leave a part out without a word.

vLLM 0.32 asks of an adapter's tensors whether the model has some layer of that last name, and
nothing more.  What reaches no layer is left out: a layer of a number that the model does not have,
one that ``--lora-target-modules`` leaves out, one that no wrapper fits, one that is run under a
second name (``shared_expert_gate`` of Qwen2-MoE and Qwen3-Next is their experts' ``expert_gate``).
What is smaller than its layer is filled up with zeros.  An adapter of ``kv_b_proj`` in latent
attention changes nothing on a CPU, and at most the prefill on a GPU, as the weight is folded into
others when it is loaded.  Those of ``q_proj`` and ``k_proj`` in Llama 4 are added in the order of
rows that the weights had before it was changed for vLLM's rotary embedding.

This can go with a vLLM whose ``WorkerLoRAManager._load_adapter`` raises for all of these.
"""

from collections.abc import Collection, Mapping
from typing import Any

from attnres_serve.compat import decoder
from attnres_serve.errors import SettingError

Shape = tuple[int, ...]


def require() -> None:
    """Have an AttnRes model refuse an adapter that it cannot take whole (idempotent).

    The models of vLLM's own in this process take what they took before.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager

    own: Any = WorkerLoRAManager._load_adapter
    if getattr(own, "requires_whole", False):
        return

    def _load_adapter(self, lora_request):
        adapter, manager = own(self, lora_request), self._adapter_manager
        base = getattr(manager.model, "attn_res_base", None)
        if base is not None:
            found = problem(adapter.loras, manager, base.needed)
            if found is not None:
                raise SettingError(f"the LoRA adapter {lora_request.lora_name!r} {found}")
        return adapter

    _load_adapter.requires_whole = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = _load_adapter  # type: ignore[method-assign]


def problem(layers: Mapping[str, Any], manager: Any, needed: Mapping[str, Shape]) -> str | None:
    """Why a model cannot take an adapter whole, as the end of a sentence; None where it can.

    Args:
        layers: vLLM's ``LoRALayerWeights``, by vLLM's names of the layers that they change.
        manager: vLLM's ``LoRAModelManager``, which has the layers that take adapters.
        needed: the shape of every weight of the model, by the checkpoint's names.
    """
    weights = _by_names_of_vllm(manager.model, needed)
    read, altered = _read(manager), _altered(manager.model)
    for name, layer in layers.items():
        if not decoder.is_on_this_stage(manager.model, name):
            continue
        if how := altered.get(name.rpartition(".")[2]):
            return (
                f"changes {name}, which vLLM {how} when it loads the model, and the adapter would "
                "not fit it; train it without that layer, or merge it into the weights."
            )
        if not _is_read(name, read):
            return (
                f"changes {name}, to which vLLM applies no adapter in this model; name the layer "
                "in --lora-target-modules if that is given, and otherwise merge the adapter into "
                "the weights."
            )
        weight = weights.get(name, ())
        if len(weight) > 2 and ".experts" not in name:
            return (
                f"changes {name}, which is no matrix but {list(weight)} by config.json, and vLLM "
                "applies adapters to matrices; train it without that layer, or merge it into the "
                "weights."
            )
        if len(weight) == 2 and not _fits(layer, weight, _is_embedding(manager, name)):
            shapes = [list(part.shape) for part in (layer.lora_a, layer.lora_b)]
            return (
                f"has the shapes {' and '.join(map(str, shapes))} for {name}, whose weight is "
                f"{list(weight)} by config.json; give the adapter of this model."
            )
    return None


def _fits(layer: Any, weight: Shape, is_embedding: bool) -> bool:
    """Whether ``B A`` has the shape of a weight, or, of an embedding, that of its transpose."""
    (rank, columns), (rows, own_rank) = layer.lora_a.shape, layer.lora_b.shape
    shape = (columns, rows) if is_embedding else (rows, columns)
    return bool(rank == own_rank and shape == tuple(weight))


def _is_embedding(manager: Any, name: str) -> bool:
    from vllm.lora.layers import VocabParallelEmbeddingWithLoRA

    return isinstance(manager.modules.get(name), VocabParallelEmbeddingWithLoRA)


def _by_names_of_vllm(model: Any, needed: Mapping[str, Shape]) -> dict[str, Shape]:
    """Shapes of weights by the names of vLLM's layers, before any are fused."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        rename = str
    else:  # an older mapper renames by itself
        rename = getattr(mapper, "get_rename_mapper", lambda: mapper)()._map_name
    stems = {name.removesuffix(".weight"): shape for name, shape in needed.items()}
    return {rename(stem): shape for stem, shape in stems.items()}


def _read(manager: Any) -> set[str]:
    """Names of the layers that take adapters, and of those that vLLM fuses them of."""
    from vllm.lora.layers import BaseLayerWithLoRA

    held = {
        id(child)
        for module in manager.model.modules()
        if not isinstance(module, BaseLayerWithLoRA)
        for child in module.children()
    }
    # A layer that a module still has without its wrapper runs without the adapter.
    whole = [name for name, layer in manager.modules.items() if id(layer.base_layer) not in held]
    return {*whole}.union(*(manager.packed_modules.get(name, ()) for name in whole))


def _is_read(name: str, read: Collection[str]) -> bool:
    mixture, experts, _ = name.partition(".experts")
    return name in read or (bool(experts) and mixture + experts in read)


def _altered(model: Any) -> dict[str, str]:
    """What vLLM does to the weights of a model that are not run as they are stored, by layers."""
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    found = {}
    if "MLAAttention" in classes:
        found["kv_b_proj"] = "folds into other weights"
    if hasattr(model, "permute_qk_weight_for_rotary"):
        found |= dict.fromkeys(("q_proj", "k_proj"), "gives another order of rows")
    return found
