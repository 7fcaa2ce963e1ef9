"""KV connectors, which hand what attention has kept of a prompt to other engines."""

from attnres_serve.compat import engine_config
from attnres_serve.families.family import Family

EXAMPLE = "ExampleConnector"  # vLLM's, for trying: a file for each layer of a prompt


def problem(vllm_config, family: Family) -> str | None:
    """Why a model cannot have the connector that was asked for, in one sentence; None if it can."""
    transfer = vllm_config.kv_transfer_config
    flags = {  # vLLM makes a connector of the second later
        "--kv-transfer-config": transfer,
        "--kv-offloading-size": vllm_config.cache_config.kv_offloading_size,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if given and family.state_bytes(vllm_config.model_config.hf_config.attn_res_config, 2):
        return (
            f"a KV connector is set ({' and '.join(given)}), which was not shown exact with the "
            f"recurrent states of {family.title}; start the server without it."
        )
    if transfer is None or not _is_example(transfer):
        return None
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    lacks = {
        "--tensor-parallel-size, whose workers write one file": parallel.tensor_parallel_size > 1,
        "--enable-lora, as a file does not tell whose it is": engine_config.uses_lora(vllm_config),
        "--speculative-config": vllm_config.speculative_config is not None,
        "prefix caching; add --no-enable-prefix-caching": (
            vllm_config.cache_config.enable_prefix_caching
        ),
        "prompts in chunks, of which it stores the first; add --no-enable-chunked-prefill": (
            scheduler.enable_chunked_prefill
        ),
    }
    found = next((name for name, is_used in lacks.items() if is_used), None)
    return found and f"vLLM's {EXAMPLE} fails or answers wrongly with {found}."


def _is_example(transfer) -> bool:
    """Whether it is vLLM's example, or one of several connectors is."""
    others = transfer.kv_connector_extra_config.get("connectors", [])
    names = [transfer.kv_connector, *(other.get("kv_connector") for other in others)]
    return EXAMPLE in names
