"""Files that hold a trace: the JSON of the server's route, or arrays with that JSON beside them.

Arrays were written before traces were those of xarray, and are still read.
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

ANSWER = "answer"  # name of the JSON, as bytes, among the arrays
JSON = ".json"
ZIP = b"PK"  # how a file of arrays begins


def write(path: Path, answer: TraceAnswer) -> None:
    """Write a trace as JSON.

    Args:
        path: a name that ends with .json.
        answer: the trace.

    Raises:
        SettingError: the name ends otherwise, or the file cannot be written.
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
    """Read a trace of either kind, which is told by what is in the file.

    Args:
        path: of the file.
        flag: what names it on a command line, with which a sentence begins then.

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
