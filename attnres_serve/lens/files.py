"""Files of a trace: the JSON of the server's route, or arrays together with that JSON.

Earlier versions wrote arrays, which are still read.
"""

import io
import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from pydantic import ValidationError

from attnres_serve.errors import SettingError
from attnres_serve.lens.fit import require_fit
from attnres_serve.tracing.answer import TraceAnswer

ANSWER = "answer"  # name of the array that holds the JSON as bytes
JSON = ".json"
ZIP = b"PK"  # the first bytes of a file of arrays


def write(path: Path, answer: TraceAnswer) -> None:
    """Write a trace as JSON.

    Args:
        path: a name that ends with .json.
        answer: the trace.

    Raises:
        SettingError: the suffix is not .json, or the file cannot be written.
    """
    if path.suffix.lower() != JSON:
        raise SettingError(
            f"{path}: expected a name that ends with {JSON}; `data` of the trace writes arrays, "
            "for example by to_netcdf."
        )
    try:
        path.write_text(answer.model_dump_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise SettingError(f"{path} cannot be written ({error}).") from None


def read(path: Path, flag: str = "") -> TraceAnswer:
    """Read a trace of either kind, which the content of the file decides.

    Args:
        path: the file.
        flag: the flag that named the file, with which a message then begins.

    Raises:
        SettingError: it holds no trace, or its numbers do not fit its tokens and sources.
    """
    name = f"{flag}: {path}" if flag else str(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingError(f"{name} cannot be read ({error}).") from None
    try:
        trace = TraceAnswer.model_validate_json(_json(content))
    except (ValidationError, ValueError, KeyError, BadZipFile, zlib.error):
        raise SettingError(
            f"{name} is no trace; give a file that `inspect --out FILE.json`, POST "
            "/v1/attn_res/trace or Trace.save wrote."
        ) from None
    require_fit(trace, name)
    return trace


def _json(content: bytes) -> bytes:
    if not content.startswith(ZIP):
        return content
    with np.load(io.BytesIO(content)) as arrays:
        answer: np.ndarray = arrays[ANSWER]
        return answer.tobytes()
