"""The checkpoint of an engine's drafts, by its ``VllmConfig``; and their model in a worker."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def config_of_draft(vllm_config) -> Any:
    """vLLM's configuration of the draft."""
    return vllm_config.speculative_config.draft_model_config.hf_config


def head_of_another(vllm_config) -> str | None:
    """The checkpoint whose head makes drafts; None if it is the served one."""
    model, drafts = vllm_config.model_config, vllm_config.speculative_config
    names = [name for name in (model.model, getattr(model, "model_weights", "")) if name]
    return another(names, model.revision, drafts.model, drafts.revision)


def another(
    served: Iterable[str], revision: str | None, name: str, its_revision: str | None
) -> str | None:
    """A description of a checkpoint for people; None if it is the served one.

    Args:
        served: the names of the served one.
        revision: its branch, tag or commit.
        name: the checkpoint's name or folder.
        its_revision: its branch, tag or commit.
    """
    if Path(name) not in map(Path, served):
        return name
    is_folder = Path(name).is_dir()  # folders have no revisions
    return None if its_revision == revision or is_folder else f"{name} at revision {its_revision}"


def draft_model(worker) -> tuple[Any, Any] | None:
    """The draft model of a worker and its configuration; None without one."""
    speculation = worker.vllm_config.speculative_config
    model = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    config = getattr(speculation, "draft_model_config", None)
    return None if model is None or config is None else (model, config)
