"""Reading tensors, and nothing else, from safetensors files and pickles.

Tensors are mapped from their file, so they cost no memory until they are read.
"""

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnres_serve.checkpoints.files import Header, indexed_files, opened, safetensors_files
from attnres_serve.checkpoints.other_files import PICKLES, pickles
from attnres_serve.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
PICKLE_INDEX = "pytorch_model.bin.index.json"
# Keys of the weights in files of trainers that save more than weights.
_HOLDERS = ("model", "state_dict", "model_state_dict")
_LR_ATTNRES = re.compile(r"(^|\.)attn_residuals\.\d+\.query$")


def files(folder: Path) -> list[Path]:
    """The files of weights in a folder: safetensors if there are any, else pickles.

    Raises:
        CheckpointError: there are none, one is missing, or the choice of pickle is ambiguous.
    """
    if any(folder.glob("*.safetensors*")):
        return safetensors_files(folder)
    if (folder / PICKLE_INDEX).is_file():
        return indexed_files(folder / PICKLE_INDEX)
    candidates = pickles(folder)
    if folder / "pytorch_model.bin" in candidates:
        return [folder / "pytorch_model.bin"]
    if len(candidates) > 1:
        raise CheckpointError(
            f"{folder} holds the pickles {candidates[0].name} and {candidates[1].name} without an "
            "index; leave only the one that holds the weights."
        )
    return candidates or safetensors_files(folder)


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of one file.

    Raises:
        CheckpointError: the file is damaged, or holds more than plain tensors.
    """
    if path.suffix in PICKLES:
        yield from read_pickle(path).items()
        return
    with opened(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is not a mapping
            yield name, file.get_tensor(name)


def read_tensor(headers: Mapping[str, Header], name: str) -> Tensor:
    """One tensor of a checkpoint, as stored.

    Args:
        headers: of a checked checkpoint.
        name: its name in the checkpoint.
    """
    with opened(headers[name].file, "pt") as tensors:
        tensor: Tensor = tensors.get_tensor(name)
        return tensor


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of ``torch.save``; its code is never run.

    Raises:
        CheckpointError: it is damaged, holds more than tensors, or has an unsupported format.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about protocols and archives; real problems raise
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL ([\w.]+)|(?:class|function) ([\w.]+)", str(error))
        reason = f" (it asks for {match[1] or match[2]})" if match else ""
        raise CheckpointError(
            f"{path} holds more than tensors{reason}, so it was not read and nothing in it was "
            "run; save the state_dict alone where the model was trained, or better safetensors."
        ) from None
    except Exception as error:  # damaged archives raise anything
        if "resize storage" in str(error):  # the stored storage is too small
            raise CheckpointError(
                f"{path} holds a tensor without its values (its storage was freed, as FSDP frees "
                "what other processes hold); gather the whole model where it was trained, and "
                "save that."
            ) from None
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise CheckpointError(
            f"{path} cannot be read as tensors ({type(error).__name__}: {reason}); copy or "
            "download it again, or save the model as safetensors."
        ) from None
    _refuse_unwritten(path)
    return _state_dict(content, path)


def _refuse_unwritten(path: Path) -> None:
    """Raise CheckpointError for tensors that torch reserved but did not write.

    Their checksums are 0. All checksums are 0 if torch was set to compute none.
    """
    if not zipfile.is_zipfile(path):
        return
    records = zipfile.ZipFile(path).infolist()
    computed = any(record.CRC for record in records if record.filename.endswith("/data.pkl"))
    unwritten = [
        record
        for record in records
        if "/data/" in record.filename and record.file_size and not record.CRC
    ]
    if computed and unwritten:
        raise CheckpointError(
            f"{path} holds {len(unwritten)} tensors without their values (as torch's skip_data or "
            "FakeTensorMode saves them); save the model again where its weights are."
        )


def _state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(content, dict):
        for key in _HOLDERS:
            if isinstance(content.get(key), dict):
                content = content[key]
                break
    if not isinstance(content, dict) or not content:
        raise CheckpointError(
            f"{path} holds no tensors by name; expected a state_dict as torch.save writes it."
        )
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{path} holds {name!r}, a {type(tensor).__name__}, among its tensors; save the "
                "state_dict alone."
            )
        if _LR_ATTNRES.search(name):
            raise CheckpointError(
                f"{path} is a checkpoint of the LR-AttnRes format (it holds {name}), which is not "
                "supported: it has no config.json, so neither its blocks nor its base model are "
                "known; write the model in the house format (docs/use/formats.md)."
            )
    return {name: plain(name, tensor, path) for name, tensor in content.items()}


def plain(name: str, tensor: Tensor, file: Path) -> Tensor:
    """A tensor without gradient, with its lazy negation applied.

    Raises:
        CheckpointError: it has no values, or other processes hold some.
    """
    tensor = tensor.detach()
    if type(tensor) is not Tensor:
        raise CheckpointError(
            f"the tensor {name} in {file} is a {type(tensor).__name__}, not a tensor by itself; "
            "gather the whole model where it was trained, and save plain tensors."
        )
    if tensor.is_meta:
        raise CheckpointError(
            f"the tensor {name} in {file} has no values (it is on the device meta, as of a model "
            "that was offloaded or never filled); save the model again where its weights are."
        )
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def header(name: str, tensor: Tensor, file: Path) -> Header:
    """The safetensors header of a tensor.

    Raises:
        CheckpointError: it is sparse, nested or quantised, or of an unsupported dtype.
    """
    if tensor.is_nested or tensor.layout != torch.strided or tensor.dtype not in DTYPES:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise CheckpointError(
            f"the tensor {name} in {file} is a {kind} tensor of {tensor.dtype}; expected a dense "
            "one of plain numbers."
        )
    return Header(tuple(tensor.shape), DTYPES[tensor.dtype], file)
