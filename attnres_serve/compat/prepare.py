"""The moments at which workarounds are due; the rest of the project calls none of them by name."""

from attnres_serve.compat import device, failures, start_events, versions
from attnres_serve.compat.workarounds import (
    adapter_refusals,
    adapters_again,
    amx,
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
    long_refusals,
    malloc,
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
    quick_exit,
    replaced_weights,
    responses_errors,
    rotary,
    router_bias,
    rows_without_adapter,
    seeds_beside_others,
    shared_memory,
    torch_vector_math,
    unsendable,
    whole_adapters,
    worker_limits,
    xielu,
    zeroed_blocks,
)
from attnres_serve.errors import SettingError


def process() -> None:
    """Called in every process that loads vLLM's plugins (idempotent)."""
    if orphans.is_process_of_vllm():
        orphans.end_with_parent()
        if start_events.is_heard():  # other servers' processes end as vLLM has them end
            failures.tell_logged()
            quick_exit.instead_of_finalization()
    if device.is_cpu():
        hybrid_prefix_caching.off_by_default()
        mla_context.keep_settings()
    if orphans.is_engine_of_vllm():
        no_token_left.end_answers()
    torch_vector_math.settle()


def engine(vllm_config) -> None:
    """Called where an engine's configuration is made, before any worker starts (idempotent).

    Raises:
        SettingError: prefix caching was asked for, and the model cannot run with it here; or
            weights of a trainer were, which AttnRes models do not take.
    """
    replaced_weights.check_start(vllm_config)
    replaced_weights.refuse_for_clients()
    if vllm_config.lora_config is not None:
        adapters_again.refuse_for_clients()
    if device.is_cpu():
        if vllm_config.cache_config.enable_prefix_caching:
            problem = hybrid_prefix_caching.problem(vllm_config.model_config)
            if problem is not None:
                raise SettingError(problem)
        mla_backend.ask_for_cpu_mla(vllm_config)
    orphans.end_coordinator_with_parent(vllm_config)
    no_token_left.end_answers()  # of an engine in this process


def worker(vllm_config) -> None:
    """Called where a model is about to be built, before anything is compiled (idempotent)."""
    amx.permit_amx()
    shared_memory.forget_shared_memory()
    python_frames.give_loops_room()
    xielu.in_the_models_type()
    replaced_weights.refuse_in_workers()
    if vllm_config.speculative_config is not None:
        draft_blocks.read_own_blocks()
        if device.is_cpu():
            draft_sampling.repeat_for_drafts()
            numba_threads.launch_early()
    if vllm_config.lora_config is not None:
        whole_adapters.require()
        if device.is_cpu():
            experts_beside_adapters.use_usual_kernel()
            rows_without_adapter.leave_as_they_are()
            prompts_of_adapters.tell_whose_rows()
    if device.is_cpu():
        malloc.keep_freed()
        rotary.rotate_every_head()
        router_bias.correct_softmax()
        seeds_beside_others.keep_seeds()
        expert_map.use_local_experts()
        mla_backend.compute_every_row()
        zeroed_blocks.zero_whole_blocks()
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            eager_stages.make_room()
    if not vllm_config.model_config.enforce_eager:
        compile_paths.quote_paths()
        inductor.keep_order_of_mutations()
        # A vLLM that was not tested may mean more by what it misses: it compiles anew.
        if device.is_cpu() and not versions.untested():
            compiled_code.accept()


def routes() -> None:
    """Called where a server's routes are made, before adapters are loaded (idempotent)."""
    adapter_refusals.answer_in_a_sentence()
    dead_engine.answer_in_a_sentence()
    long_refusals.cut_long_messages()
    model_names.list_in_refusals()
    grammar_refusals.answer_in_a_sentence()
    responses_errors.stream_refusals()
    penalties.refuse_overflowing_beams()
    prompt_logprobs.give_to_every_answer()


def server(client) -> None:
    """Called when a server's engine runs, with vLLM's engine client."""
    ids_without_row.refuse_ids_without_row(client)
    ids_without_row.name_the_field(client)
    worker_limits.refuse_beyond_workers(client)
    unsendable.refuse_unsendable(client)
    penalties.refuse_overflowing(client)
    grammar_refusals.refuse_uncompiled(client)
    no_token_left.refuse_contradictions(client)
    no_token_left.refuse_dead_ends(client)
