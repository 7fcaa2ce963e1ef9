"""What a start replaces: ``python identity.py CHECKPOINT RESULT``.

Everything that the process farm imports is imported before.  The result is JSON: the attributes of
vLLM's, torch's, uvicorn's and starlette's modules and classes that are another object after a start
than before, as ``module:Class.attribute``, if they can be called, read as a property or are the
bases of a class.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARIES = ("vllm", "torch", "uvicorn", "starlette")


def attributes() -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and module is not None:
            found |= {(name, path): value for path, value in _of_module(name, module)}
    return found


def _of_module(name: str, module: Any) -> Iterator[tuple[str, Any]]:
    for attribute, value in list(vars(module).items()):
        if isinstance(value, type) and value.__module__ == name:
            yield f"{attribute}.__bases__", value.__bases__
            for own, inner in list(vars(value).items()):
                if callable(inner) or isinstance(inner, property | classmethod | staticmethod):
                    yield f"{attribute}.{own}", inner
        elif callable(value):
            yield attribute, value


def _was_there(module: str, path: str, before: dict[tuple[str, str], Any]) -> bool:
    """Whether it, or the class that has got it, was there before."""
    return (module, path) in before or (module, f"{path.partition('.')[0]}.__bases__") in before


def main(checkpoint: str, result: str) -> None:
    from vllm import LLM, SamplingParams
    from zygote import IMPORTED

    from attnres_serve.compat import openai_app, patches, prepare

    for name in IMPORTED:
        importlib.import_module(name)
    for found in (one for each in patches.table().values() for one in each):
        for target in found.targets if found.is_due() and not found.of else ():
            importlib.import_module(target.partition(":")[0])
    before = attributes()
    llm = LLM(checkpoint, dtype="float32", max_model_len=64, enforce_eager=True)
    if hasattr(llm.llm_engine.vllm_config.model_config.hf_config, "attn_res_config"):
        prepare.routes()  # as where a server is begun
        openai_app.refuse_bodies_by(print)
    llm.generate([{"prompt_token_ids": [3, 4, 5]}], SamplingParams(max_tokens=2), use_tqdm=False)
    after = attributes()
    changed = [
        f"{module}:{path}"
        for (module, path), value in after.items()
        if before.get((module, path)) is not value and _was_there(module, path, before)
    ]
    llm.llm_engine.engine_core.shutdown()
    Path(result).write_text(json.dumps(sorted(changed)))


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    main(*sys.argv[1:])
