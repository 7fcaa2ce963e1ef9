"""The moments that apply workarounds; the rest of the project calls only these."""

from attnres_serve.compat import changing_edits, device, unguarded, versions
from attnres_serve.compat.workarounds import (
    adapter_refusals,
    adapters_again,
    amx,
    bare_refusals,
    compile_paths,
    compiled_code,
    dead_engine,
    draft_blocks,
    draft_sampling,
    eager_stages,
    expert_map,
    experts_beside_adapters,
    grammar_refusals,
    hybrid_prefix_caching,
    ids_without_row,
    inductor,
    int8_in_float32,
    long_refusals,
    malloc,
    messages_errors,
    mla_backend,
    mla_context,
    model_names,
    no_token_left,
    numba_threads,
    orphans,
    penalties,
    prompt_logprobs,
    prompts_of_adapters,
    python_frames,
    replaced_weights,
    replacing_calls,
    responses_errors,
    rotary,
    router_bias,
    rows_without_adapter,
    seeds_beside_others,
    seeds_of_chunks,
    shared_memory,
    torch_vector_math,
    unsendable,
    whole_adapters,
    worker_limits,
    xielu,
    zeroed_blocks,
)
from attnres_serve.errors import SettingError
from attnres_serve.start import events, failures, quick_exit


def process() -> None:
    """Called in every process that loads vLLM's plugins (idempotent)."""
    if orphans.is_process_of_vllm():
        orphans.end_with_parent()
        if events.is_heard():  # processes of other servers end as usual in vLLM
            failures.tell_logged()
            quick_exit.instead_of_finalization()
    if device.is_cpu():
        hybrid_prefix_caching.PATCH.apply()
        mla_context.PATCH.apply()
    if orphans.is_engine_of_vllm():
        no_token_left.PATCH.apply()
    torch_vector_math.settle()


def engine(vllm_config) -> None:
    """Called when an engine's configuration is made, before any worker starts (idempotent).

    Raises:
        SettingError: the model does not support prefix caching, weights from a trainer or changes
            of edits here, and the configuration has them.
        SystemExit: an engine's process runs a script without a guard.
    """
    unguarded.end_import(vllm_config)
    replaced_weights.check_start(vllm_config)
    changing_edits.check_start(vllm_config)
    for patch in (*replacing_calls.CLIENTS, changing_edits.PATCH):
        patch.apply()
    if vllm_config.lora_config is not None:
        for patch in adapters_again.PATCHES:
            patch.apply()
    if device.is_cpu():
        if vllm_config.cache_config.enable_prefix_caching:
            problem = hybrid_prefix_caching.problem(vllm_config.model_config)
            if problem is not None:
                raise SettingError(problem)
        mla_backend.ask_for_cpu_mla(vllm_config)
    if vllm_config.parallel_config.data_parallel_size > 1:
        orphans.PATCH.apply()
    no_token_left.PATCH.apply()  # of an engine in this process


def worker(vllm_config) -> None:
    """Called before a model is built and anything is compiled (idempotent)."""
    amx.permit_amx()
    shared_memory.forget_shared_memory()
    python_frames.PATCH.apply()
    if vllm_config.model_config.hf_config.attn_res_config.get("hidden_act") == "xielu":
        xielu.PATCH.apply()
    for patch in replaced_weights.WORKERS:
        patch.apply()
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        replaced_weights.offer()
    if vllm_config.speculative_config is not None:
        draft_blocks.PATCH.apply()
        if device.is_cpu():
            draft_sampling.PATCH.apply()
            numba_threads.launch_early()
    if vllm_config.lora_config is not None:
        whole_adapters.PATCH.apply()
        if device.is_cpu():
            experts_beside_adapters.PATCH.apply()
            rows_without_adapter.PATCH.apply()
            prompts_of_adapters.PATCH.apply()
    if device.is_cpu():
        malloc.keep_freed()
        rotary.PATCH.apply()
        router_bias.PATCH.apply()
        seeds_beside_others.PATCH.apply()
        seeds_of_chunks.PATCH.apply()
        int8_in_float32.PATCH.apply()
        expert_map.PATCH.apply()
        mla_backend.compute_every_row()
        zeroed_blocks.PATCH.apply()
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            eager_stages.PATCH.apply()
    if not vllm_config.model_config.enforce_eager:
        for patch in (*compile_paths.PATCHES, inductor.PATCH):
            patch.apply()
        # In an untested vLLM the missing method may do more, so the code is compiled anew.
        if device.is_cpu() and not versions.untested():
            compiled_code.accept()


def routes() -> None:
    """Called when a server's routes are made, before adapters are loaded (idempotent)."""
    adapter_refusals.PATCH.apply()
    bare_refusals.PATCH.apply()
    for patch in (*dead_engine.PATCHES, *long_refusals.PATCHES):
        patch.apply()
    model_names.PATCH.apply()
    grammar_refusals.PATCH.apply()
    responses_errors.PATCH.apply()
    messages_errors.PATCH.apply()
    penalties.PATCH.apply()
    prompt_logprobs.PATCH.apply()


def server(client) -> None:
    """Called when a server's engine runs, with vLLM's engine client."""
    dead_engine.watch(client)
    ids_without_row.refuse_ids_without_row(client)
    ids_without_row.name_the_field(client)
    worker_limits.refuse_beyond_workers(client)
    unsendable.refuse_unsendable(client)
    penalties.refuse_overflowing(client)
    grammar_refusals.refuse_uncompiled(client)
    no_token_left.refuse_contradictions(client)
    no_token_left.CLIENT.apply_to(client)
