"""The table of unsupported configurations: the first row that applies refuses.

Rows with a limit are for families that state it.  The others are for all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnres_serve import formats, settings
from attnres_serve.compat import device, engine_config, versions
from attnres_serve.compat.engine_facts import EXAMPLE, WIDEST, EngineFacts
from attnres_serve.errors import SettingError
from attnres_serve.families import footprint
from attnres_serve.families.limits import Limit
from attnres_serve.lora.refusals import REMEDY

LINEAR_SINCE = (0, 32)
WITHOUT_DRAFTS = (0, 30)  # on a CPU
CACHES = {
    "a KV cache": footprint.cached_layers,
    "a recurrent state": footprint.convolved_layers,
}
# Values of --load-format whose tensors go through the model's ``load_weights``.
LOADING = ("auto", "safetensors", "fastsafetensors", "hf", "pt", "npcache", "runai_streamer")
STAGES = (
    "set VLLM_PP_LAYER_PARTITION so that each stage has one, or a smaller --pipeline-parallel-size."
)


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        when: gives the problem, or a false value without one.
        sentence: the refusal, with {value} for the result of ``when``, and {facts}.
        limit: of the families to which the row applies; None for all.
    """

    when: Callable[[EngineFacts], Any]
    sentence: str
    limit: Limit | None = None


def require(facts: EngineFacts) -> None:
    """Refuse configurations that AttnRes, or vLLM with it, does not support.

    Raises:
        SettingError: one sentence about the first such setting.
    """
    for rule in RULES:
        is_due = rule.limit is None or rule.limit in facts.family.limits
        if is_due and (value := rule.when(facts)):
            raise SettingError(rule.sentence.format(value=value, facts=facts))


RULES = (
    Rule(
        lambda facts: facts.has_drafts and facts.has_stages,
        "speculative decoding is not supported with pipeline parallelism, of which only the "
        "last stage has drafts in vLLM; leave --pipeline-parallel-size out, or start without "
        "--speculative-config.",
    ),
    Rule(
        lambda facts: engine_config.pools(facts.vllm),
        "embeddings, classification and scoring are not supported with AttnRes; serve it with "
        "--runner generate and without --convert.",
    ),
    Rule(
        lambda facts: (
            device.is_cpu()
            and versions.is_older_than((0, 30))
            and facts.vllm.parallel_config.enable_expert_parallel
        ),
        "--enable-expert-parallel is set, with which vLLM before 0.30 reads the experts of other "
        "workers on a CPU; leave it out, or install a later vLLM.",
    ),
    Rule(
        lambda facts: device.is_cpu() and engine_config.uses_ray(facts.vllm),
        "--distributed-executor-backend is ray, which vLLM has on GPUs alone; leave it out on "
        "a CPU, where processes are started without Ray, on several machines by --nnodes.",
    ),
    Rule(
        lambda facts: (
            facts.has_lora and formats.by_name(facts.model.attn_res_format).layer_names_of
        ),
        "LoRA adapters are not supported on {value} checkpoints: their names are {value}'s, and "
        "vLLM would apply only a part of them; convert the model to the house format.",
    ),
    # vLLM's first layer divides the residual by the routed scaling factor.
    Rule(
        lambda facts: str(facts.vllm.model_config.dtype) == "torch.float16",
        "--dtype is float16, in which vLLM's layers of this family scale the residual, and AttnRes "
        "has none to scale; choose bfloat16 or float32.",
        Limit.FLOAT16,
    ),
    Rule(
        lambda facts: facts.parallel.use_sequence_parallel_moe,
        "expert parallelism with tensor and data parallelism splits the residual of this family's "
        "layers over workers, which AttnRes does not support; leave one of the three out.",
        Limit.SEQUENCE_PARALLEL,
    ),
    # On a CPU the kernel is ours.
    Rule(
        lambda facts: not device.is_cpu(),
        "vLLM's kernel of lightning attention computes prompts of more than 256 tokens, and those "
        "in chunks, by another function than their continuation; serve this family on a CPU.",
        Limit.LIGHTNING,
    ),
    # Workers agree on one layout of caches and their groups, on CPU by the layers they have.
    # With only recurrent layers the layout differs, and without any there is no group for states.
    Rule(
        lambda facts: device.is_cpu() and facts.stage_without(CACHES),
        "the pipeline stage {value}, which vLLM cannot run beside other stages on CPU; " + STAGES,
        Limit.BOTH_CACHES,
    ),
    # The class searches every stage for a layer with experts, and raises without one.
    Rule(
        lambda facts: facts.stage_without({"experts": footprint.expert_layers}),
        "the pipeline stage {value}, which vLLM's class of this family needs; " + STAGES,
        Limit.EXPERTS,
    ),
    # The attributes of a batch about new sequences were checked from this version on.
    Rule(
        lambda facts: versions.is_older_than(LINEAR_SINCE),
        f"models with linear attention need vLLM {versions.dotted(LINEAR_SINCE)} or later; "
        "install it, or a later one.",
        Limit.LINEAR_ATTENTION,
    ),
    # vLLM copies a cached state for drafts with a Triton kernel, which CPUs do not have.
    Rule(
        lambda facts: (
            device.is_cpu() and facts.vllm.num_speculative_tokens and facts.caches_prefixes
        ),
        "speculative decoding on CPU is not supported with prefix caching for models with linear "
        "attention; add --no-enable-prefix-caching, or start without --speculative-config.",
        Limit.LINEAR_ATTENTION,
    ),
    # A worker has whole heads of a recurrence; vLLM checks only those of attention.
    Rule(
        EngineFacts.divided_heads,
        "--tensor-parallel-size is {facts.parallel.tensor_parallel_size}, which does not divide "
        "{value}; choose one that does.",
        Limit.LINEAR_ATTENTION,
    ),
    # vLLM continues with the state of a rejected draft, and answers with other tokens.  On a CPU
    # these layers keep one state for a sequence.  Without an attention layer, the runner for CPUs
    # and the older one for GPUs count no accepted drafts (0.32).  The newer runner and devices
    # other than CUDA have not been tried.
    Rule(
        lambda facts: (
            not (device.is_cuda() and facts.vllm.model_config.is_hybrid)
            and facts.vllm.num_speculative_tokens
        ),
        "speculative decoding with {value} tokens is not supported here for this family, whose "
        "recurrent states cannot go back; start without --speculative-config.",
        Limit.DRAFTS,
    ),
    # vLLM's layer branches on the batch, which a compiler would fix.
    Rule(
        lambda facts: not device.is_cpu() and not facts.vllm.model_config.enforce_eager,
        "this family cannot be compiled on this device, as vLLM's layer of Kimi Delta Attention is "
        "no operator of torch's; add --enforce-eager.",
        Limit.EAGER_ON_GPU,
    ),
    # vLLM's kernel for a prompt's convolution has branches for 2, 3 and 4 tokens.  For more, it
    # silently uses one value for all (``causal_conv1d.py``, 0.32).
    Rule(
        lambda facts: not device.is_cpu() and facts.wide_convolution(),
        f"{{value}}, and vLLM's kernel for GPUs computes convolutions of up to {WIDEST} tokens; "
        "serve this model on a CPU.",
    ),
    # Experts of several engines gather tokens by a function that vLLM 0.32 has only on GPUs.
    Rule(
        lambda facts: (
            device.is_cpu()
            and facts.parallel.data_parallel_size != 1
            and footprint.expert_layers(facts.shapes)
        ),
        "--data-parallel-size is {facts.parallel.data_parallel_size}, by which vLLM divides a "
        "mixture of experts on GPUs alone; start as many servers without it.",
    ),
    # This version uses GPU kernels for drafts even on a CPU, which ends the engine.
    Rule(
        lambda facts: (
            device.is_cpu()
            and facts.vllm.num_speculative_tokens
            and versions.is_minor(WITHOUT_DRAFTS)
        ),
        f"speculative decoding on a CPU ends the engine of vLLM {versions.dotted(WITHOUT_DRAFTS)}; "
        "install another version that is supported, or start without --speculative-config.",
    ),
    Rule(
        EngineFacts.connectors_of_states,
        "a KV connector is set ({value}), which was not shown exact with the recurrent states of "
        "{facts.family.title}; start the server without it.",
    ),
    Rule(
        lambda facts: (
            settings.edits(facts.vllm.additional_config) is not None
            and (name := facts.vllm.load_config.load_format) not in LOADING
            and name
        ),
        "edits are written into what a model loads from a checkpoint, which --load-format {value} "
        "passes by; leave out one of the two.",
    ),
    Rule(
        lambda facts: (
            facts.vllm.kv_transfer_config and settings.edits(facts.vllm.additional_config)
        ),
        "--attnres-edit is not supported with --kv-transfer-config, as a store may hold what other "
        "edits computed; write the edits into a checkpoint by `attnres-serve convert --edit`.",
    ),
    Rule(EngineFacts.beside_example, f"vLLM's {EXAMPLE} fails or answers wrongly with {{value}}."),
    Rule(
        lambda facts: facts.shards_sites and facts.parallel.tensor_parallel_size == 1,
        "--attnres-shard-sites is on, which divides tokens over the workers of tensor "
        "parallelism, and there is one worker; leave it out, or add --tensor-parallel-size.",
    ),
    Rule(
        EngineFacts.beside_sharded_sites,
        "--attnres-shard-sites is on, which was not shown exact with {value}; leave one out.",
    ),
    Rule(
        lambda facts: facts.has_lora,
        f"LoRA adapters are not supported on {{facts.family.title}}; {REMEDY}",
        Limit.ADAPTERS,
    ),
    Rule(
        lambda facts: facts.has_lora and facts.parallel.tensor_parallel_size > 1,
        "--tensor-parallel-size is {facts.parallel.tensor_parallel_size}, with which vLLM cuts "
        "LoRA adapters of this family otherwise than its weights; serve it on one worker, or "
        + REMEDY,
        Limit.ADAPTERS_OF_WORKERS,
    ),
    Rule(
        lambda facts: device.is_cpu() and facts.targets_of_experts(),
        "LoRA adapters of experts run on a GPU alone, by a Triton kernel, and "
        "--lora-target-modules {value}; name layers beside the experts with it, for example "
        "q_proj k_proj v_proj o_proj, or " + REMEDY,
    ),
)
