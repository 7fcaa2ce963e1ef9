"""The ``vllm.general_plugins`` entry point, run in every process that vLLM starts.

It fills tables of names, settles torch's vector functions and lets vLLM's processes end with the
one that started them.  It never raises: an exception here would stop vLLM for every model on the
machine.
"""

import logging
from pathlib import Path

from attnres_serve import compat


def register() -> None:
    """Teach vLLM the AttnRes architectures and how to recognise their checkpoints (idempotent)."""
    try:
        problem = compat.unsupported_version()
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
    from attnres_serve import configs, parent, vector_math
    from attnres_serve.checkpoint import recognise
    from attnres_serve.families import FAMILIES

    if compat.is_process_of_vllm():
        parent.end_with_parent()
    vector_math.settle()
    configs.register_model_types()
    compat.install_config_parser(recognise, configs.build)
    for family in FAMILIES.values():
        compat.register_architecture(
            family.architecture, f"attnres_serve.backbones:{family.architecture}", on_config
        )


# Formats whose names for linear layers are not the base family's.
OWN_NAMES = {"fla": "FLA", "nanogpt": "nanoGPT"}


def on_config(vllm_config) -> None:
    """Check a whole configuration of vLLM's before any worker starts.

    Raises:
        SettingError: a setting that would be wrong with AttnRes.
        CheckpointError: weights that do not fit the configuration.
    """
    from attnres_serve import settings
    from attnres_serve.checkpoint import examine, examine_hub
    from attnres_serve.errors import SettingError

    warning = compat.untested_version()
    if warning:
        compat.logger().warning(warning)
    settings.algorithm(vllm_config.additional_config)
    settings.backend(vllm_config.additional_config)
    settings.traces(vllm_config.additional_config)
    method = compat.speculation_method(vllm_config)
    if method is not None and method not in settings.SPECULATION:
        raise SettingError(
            f"speculative decoding by {method!r} is not supported with AttnRes; supported: "
            f"{', '.join(settings.SPECULATION)}."
        )
    if compat.pools(vllm_config):
        raise SettingError(
            "embeddings, classification and scoring are not supported with AttnRes; serve it with "
            "--runner generate and without --convert."
        )
    config = vllm_config.model_config.hf_config
    found = getattr(config, "attn_res_format", None)
    if compat.uses_lora(vllm_config) and found in OWN_NAMES:
        raise SettingError(
            f"LoRA adapters are not supported on {OWN_NAMES[found]} checkpoints: their names are "
            f"{OWN_NAMES[found]}'s, and vLLM would apply only a part of them; convert the model to "
            "the house format."
        )
    compat.require_safetensors(vllm_config)
    compat.install_worker_extension(vllm_config)
    compat.end_coordinator_with_parent(vllm_config)
    source = compat.reads_weights_from(vllm_config)
    if source is not None and Path(source[0]).is_dir():
        examine(Path(source[0]))
    elif source is not None:
        examine_hub(*source)
