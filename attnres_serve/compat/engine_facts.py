"""Facts about an engine's configuration, as the rows of ``rules`` read them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from attnres_serve import settings
from attnres_serve.compat import engine_config, host
from attnres_serve.families import BY_ARCHITECTURE, footprint
from attnres_serve.families.family import Family, Shape

# Hugging Face's keys for the width of a short convolution, in tokens.
CONVOLUTIONS = ("linear_conv_kernel_dim", "short_conv_kernel_size", "conv_kernel", "conv_L_cache")
WIDEST = 4  # the most that vLLM's GPU kernel supports
EXAMPLE = "ExampleConnector"  # vLLM's example: a file for each layer of a prompt
EXPERTS = "experts"  # the name of a mixture's layer, and a part of names within it


@dataclass(frozen=True)
class EngineFacts:
    """The facts about one configuration.

    Attributes:
        vllm: the ``VllmConfig``, before workers start.
    """

    vllm: Any

    @property
    def model(self) -> Any:
        """The configuration of the model, from ``model.config.build``."""
        return self.vllm.model_config.hf_config

    @property
    def parallel(self) -> Any:
        return self.vllm.parallel_config

    @cached_property
    def family(self) -> Family:
        (architecture,) = self.model.architectures
        return BY_ARCHITECTURE[architecture]

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Shapes of the family's tensors, by name.

        Raises:
            CheckpointError: config.json leaves a size open.
        """
        return self.family.shapes(self.model.attn_res_config)

    @property
    def has_drafts(self) -> bool:
        return engine_config.speculation_method(self.vllm) is not None

    @property
    def has_lora(self) -> bool:
        return engine_config.uses_lora(self.vllm)

    @property
    def has_stages(self) -> bool:
        """Whether pipeline parallelism splits the layers."""
        return bool(self.parallel.pipeline_parallel_size > 1)

    @property
    def caches_prefixes(self) -> bool:
        return bool(self.vllm.cache_config.enable_prefix_caching)

    @property
    def shards_sites(self) -> bool:
        return settings.shard_tokens(self.vllm.additional_config) is not None

    def stage_without(
        self, kinds: Mapping[str, Callable[[Mapping[str, Shape]], set[int]]]
    ) -> str | None:
        """A description of the first pipeline stage without any layer of a kind in the model.

        Args:
            kinds: features of layers, with functions that give the numbers of these layers.
        """
        from vllm.distributed.utils import get_pp_indices

        stages = self.parallel.pipeline_parallel_size
        layers = self.vllm.model_config.hf_text_config.num_hidden_layers
        for name, numbers in ((name, find(self.shapes)) for name, find in kinds.items()):
            for stage in range(stages) if numbers else ():
                begin, end = get_pp_indices(layers, stage, stages)
                if numbers.isdisjoint(range(begin, end)):
                    return f"of the layers {begin} to {end - 1} has no layer with {name}"
        return None

    def divided_heads(self) -> str | None:
        """The key and the number of recurrence heads that do not divide among workers."""
        for key in ("linear_num_key_heads", "linear_num_value_heads"):
            heads = getattr(self.vllm.model_config.hf_text_config, key, 0)
            if heads % self.parallel.tensor_parallel_size:
                return f"{key}, {heads}"
        return None

    def wide_convolution(self) -> str | None:
        """The key and the width of a convolution that is too wide for vLLM's kernel."""
        config = self.vllm.model_config.hf_text_config
        linear = SimpleNamespace(**(getattr(config, "linear_attn_config", None) or {}))
        widths = (
            (key, getattr(place, key, 0)) for place in (config, linear) for key in CONVOLUTIONS
        )
        return next((f"{key} is {width}" for key, width in widths if width > WIDEST), None)

    def connectors_of_states(self) -> str | None:
        """The flags of KV connectors, where the model has recurrent states."""
        stated = engine_config.connectors(self.vllm)
        has_states = stated and self.family.state_bytes(self.model.attn_res_config, 2)
        return " and ".join(stated) if has_states else None

    def beside_example(self) -> str | None:
        """A setting that conflicts with vLLM's example connector, alone or among several."""
        if (transfer := self.vllm.kv_transfer_config) is None:
            return None
        others = transfer.kv_connector_extra_config.get("connectors", [])
        if EXAMPLE not in (transfer.kv_connector, *(other.get("kv_connector") for other in others)):
            return None
        used = {
            "--tensor-parallel-size, whose workers write one file": (
                self.parallel.tensor_parallel_size > 1
            ),
            "--enable-lora, as a file does not tell whose it is": self.has_lora,
            "--speculative-config": self.vllm.speculative_config is not None,
            "prefix caching; add --no-enable-prefix-caching": self.caches_prefixes,
            "prompts in chunks, of which it stores the first; add --no-enable-chunked-prefill": (
                self.vllm.scheduler_config.enable_chunked_prefill
            ),
        }
        return next((name for name, is_used in used.items() if is_used), None)

    def beside_sharded_sites(self) -> str | None:
        """A setting that conflicts with sharded sites."""
        if not self.shards_sites:
            return None
        used = {
            "--pipeline-parallel-size": self.has_stages,
            "--data-parallel-size": self.parallel.data_parallel_size > 1,
            "--decode-context-parallel-size": self.parallel.decode_context_parallel_size > 1,
            "--enable-dbo": self.parallel.use_ubatching,
            "--speculative-config": self.has_drafts,
            "VLLM_BATCH_INVARIANT": host.batch_invariant(),
        }
        return next((name for name, is_used in used.items() if is_used), None)

    def targets_of_experts(self) -> str | None:
        """The state of --lora-target-modules, if it includes experts."""
        if not self.has_lora or not footprint.expert_layers(self.shapes):
            return None
        if not (targets := self.vllm.lora_config.target_modules):
            return "is not given"
        has_experts = any(EXPERTS in target.split(".") for target in targets)
        return f"is {' '.join(targets)}" if has_experts else None
