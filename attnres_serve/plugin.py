"""The ``vllm.general_plugins`` entry point, run in every process that vLLM starts.

It registers names, chooses torch's vector functions and ends vLLM's processes with the one that
started them.  It never raises: an exception here would stop vLLM for every model on the machine.
"""

import logging
from pathlib import Path
from typing import Any

from attnres_serve import formats
from attnres_serve.compat import engine_config, host, native, registry, versions
from attnres_serve.errors import SettingError
from attnres_serve.formats.parsed_config import ParsedConfig
from attnres_serve.formats.resolve import with_list_of_architectures


def register() -> None:
    """Register the AttnRes architectures and their configuration parser in vLLM (idempotent)."""
    try:
        problem = versions.unsupported()
        if problem:
            logging.getLogger("vllm").warning(problem)
            return
        _register()
    except Exception as error:
        logging.getLogger("vllm").warning(
            "attnres-serve could not register itself (%s: %s): AttnRes checkpoints are not "
            "available, all other models are.",
            type(error).__name__,
            error,
        )


def _register() -> None:
    from attnres_serve.checkpoints.checked import translate
    from attnres_serve.compat import prepare
    from attnres_serve.families import FAMILIES
    from attnres_serve.model import config as model_config

    prepare.process()
    model_config.register_model_types()
    registry.install_config_parser(translate, model_config.build, is_left_to_vllm)
    for family in FAMILIES.values():
        target = f"attnres_serve.model.causal_lm:{family.architecture}"
        treated_as = family.treated_as or family.stock_architecture
        registry.register_architecture(family.architecture, treated_as, target, on_config)
        if family.draft is not None and family.draft.architecture is not None:
            head = f"{family.module}:{family.draft.cls}"
            registry.register_class(family.draft.architecture, head)


def is_left_to_vllm(config: dict[str, Any], additional_config: Any) -> bool:
    """Whether vLLM serves a checkpoint by its built-in class; the log says so.

    Args:
        config: the content of its config.json.
        additional_config: of vLLM's configuration.

    Raises:
        SettingError: the setting requests it, and it is impossible.
    """
    from attnres_serve import settings

    config = with_list_of_architectures(config)
    native_formats = (one for one in formats.SERVED.values() if one.native and one.matches(config))
    matched = next(native_formats, None)
    if matched is None or matched.native is None:
        return False
    choice = settings.choice(additional_config, settings.NATIVE_KEY)
    if settings.edits(additional_config) is not None:
        if choice == "on":
            raise SettingError(
                "attnres_native is 'on', and vLLM's own class has no edits; leave out one of the "
                "two."
            )
        return False
    if not native.is_left_to_vllm(matched.name, matched.native, choice):
        return False
    host.logger().info(
        "vLLM serves this %s checkpoint by a class of its own, without attnres-serve; "
        "--attnres-native off, or attnres_native in --additional-config, has it served here.",
        matched.name,
    )
    return True


def on_config(vllm_config) -> None:
    """Check vLLM's whole configuration before any worker starts.

    Raises:
        SettingError: a setting that would be wrong with AttnRes.
        CheckpointError: weights that do not fit the configuration.
    """
    from attnres_serve import settings
    from attnres_serve.checkpoints import aux_stream, draft, needs
    from attnres_serve.checkpoints.checked import check_folder, check_hub
    from attnres_serve.compat import drafts, prepare, rules
    from attnres_serve.compat.engine_facts import EngineFacts
    from attnres_serve.model import config as model_config

    warning = versions.untested()
    if warning:
        host.logger().warning(warning)
    for key in settings.CHOICES:
        settings.choice(vllm_config.additional_config, key)
    settings.edits(vllm_config.additional_config)
    method = engine_config.speculation_method(vllm_config)
    if method is not None:
        draft.require_method(method)
    facts = EngineFacts(vllm_config)
    rules.require(facts)
    family, config = facts.family, facts.model
    _ = facts.shapes  # raises if a size is not stated
    if family.has_float32_states:
        engine_config.keep_states_in_float32(vllm_config)
    engine_config.require_safetensors(vllm_config)
    engine_config.install_worker_extension(vllm_config)
    prepare.engine(vllm_config)
    source = engine_config.reads_weights_from(vllm_config)
    checkpoint = None
    if source is not None:
        folder = Path(source[0])
        checkpoint = check_folder(folder) if folder.is_dir() else check_hub(*source)
        needs.check_quantized(source[0], checkpoint.index)
    parsed = ParsedConfig(
        config.attn_res_format, family.name, config.attn_res_config, model_config.spec_of(config)
    )
    aux_stream.settle(vllm_config, parsed)
    if method == settings.MTP:
        index = None if checkpoint is None else checkpoint.index
        draft.check_head(parsed, index, drafts.head_of_another(vllm_config))
    _settle_tokenizer(vllm_config)


def _settle_tokenizer(vllm_config) -> None:
    """Set a tokenizer that vLLM reads as in training, and refuse tokens without rows."""
    from attnres_serve.checkpoints import hub, token_ids, tokenizer

    model = vllm_config.model_config
    rows = model.hf_config.attn_res_config["vocab_size"]
    token_ids.check_end(Path(model.model), rows)
    name = engine_config.reads_tokenizer_from(vllm_config)
    if name is None:
        return
    folder = hub.tokenizer_folder(name, model.tokenizer_revision)
    if folder is None:  # vLLM says why
        return
    token_ids.check(folder, rows)
    readable = tokenizer.readable(folder, rows, model.trust_remote_code)
    if readable != folder:
        engine_config.read_tokenizer_from(vllm_config, readable)
