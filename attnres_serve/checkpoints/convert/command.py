"""``attnres-serve convert``: make old weight files, other formats and standard models servable.

Tensors are copied one by one, in their dtype and bit for bit, into a folder beside the target.  The
folder is checked as a checkpoint, and only then gets the target's name.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tqdm import tqdm

from attnres_serve.checkpoints import check
from attnres_serve.checkpoints.checked import check_folder
from attnres_serve.checkpoints.convert.plan import Plan, make_plan
from attnres_serve.checkpoints.convert.source import Conversion, open_source
from attnres_serve.checkpoints.files import INDEX
from attnres_serve.checkpoints.renaming.rename import Rename
from attnres_serve.checkpoints.write import write_shards
from attnres_serve.depth import edit_text
from attnres_serve.errors import SettingError
from attnres_serve.sentences import amount


def convert(
    source: str,
    target: str,
    to_house: bool = False,
    zero_queries_block_size: int | None = None,
    dry_run: bool = False,
    block_size: int | None = None,
    renames: Sequence[str] = (),
    edits: Sequence[str] = (),
) -> None:
    """Write a checkpoint that computes the same as ``source``, and print what was written.

    Args:
        source: folder, or a model id whose files are in the Hugging Face cache.
        target: folder to make; it appears whole or not at all.
        to_house: into the house format; otherwise pickles only become safetensors.
        zero_queries_block_size: sublayers per block; a model with standard residuals gets zero
            queries and unit key norms, and is written in the house format.
        dry_run: only print what would be written.
        block_size: sublayers per block, to state in the config.json of a plain model whose tensors
            have queries.
        renames: other names for tensors of the source, each ``OLD=NEW``.
        edits: edits of what sites read, in the syntax of ``edit_text.read``; they are written
            into the weights.

    Raises:
        CheckpointError: the source cannot be converted exactly.
        SettingError: the target cannot be written, or a rename or an edit is invalid.
    """
    folder = Path(target).expanduser()
    _require_place(folder)
    adds_queries = zero_queries_block_size is not None
    size = zero_queries_block_size if adds_queries else block_size
    parsed_renames = tuple(map(Rename.read, renames))
    opened = open_source(Conversion(source, target, to_house, adds_queries, size, parsed_renames))
    plan = make_plan(opened, to_house, zero_queries_block_size, edit_text.each(edits))
    room = shutil.disk_usage(folder.parent).free
    if plan.size > room:
        raise SettingError(
            f"{folder} needs {amount(plan.size)}, but {folder.parent} has only "
            f"{amount(room)} free; choose another place."
        )
    if not dry_run:
        try:
            with _appearing_whole(folder) as unfinished:
                _write(plan, unfinished)
        except OSError as error:
            raise SettingError(
                f"{folder} cannot be written ({error}); nothing was left behind."
            ) from None
    print(f"{folder}{' would hold' if dry_run else ' was written'}:\n\n{render(plan)}\n")
    print(check.render(check.describe(plan.result)))


def render(plan: Plan) -> str:
    """The files of a plan as lines for people."""
    lines = ["config.json"]
    for name, headers in plan.shards.items():
        size = amount(sum(header.stored_bytes for header in headers.values()))
        lines.append(f"{name}  ({len(headers)} tensors, {size})")
    lines += [INDEX] if len(plan.shards) > 1 else []
    lines += [f"{path.name}  (as it is)" for path in plan.kept]
    lines += [f"not taken over: {', '.join(plan.left)}"] if plan.left else []
    images = sum(map(plan.source.is_of_images, plan.source.headers))
    lines += [f"not taken over: {images} tensors that read images"] if images else []
    return "\n".join(f"  {line}" for line in lines)


def _require_place(folder: Path) -> None:
    if os.path.lexists(folder):
        raise SettingError(f"{folder} exists already; choose another name, or remove it first.")
    if not folder.parent.is_dir():
        raise SettingError(f"{folder.parent} is not a folder; make it first.")


@contextmanager
def _appearing_whole(folder: Path) -> Iterator[Path]:
    """A new folder that gets the name ``folder`` if all goes well, and vanishes otherwise."""
    # A unique name, even if containers with equal process numbers share a disk.  An existing
    # folder must not be removed, so it is made outside of the try.
    unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.unfinished")
    unfinished.mkdir()
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            _sync(path)
        _require_place(folder)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    with suppress(OSError):  # written; a parent without read permission cannot be synced
        _sync(folder.parent)


def _sync(path: Path) -> None:
    """Flush a file, or a folder's names, to disk: a power loss leaves all of DST or none."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(plan: Plan, folder: Path) -> None:
    """Write a plan into an empty folder and check the result.

    Raises:
        OSError: it cannot be written.
    """
    if plan.keeps_format and not plan.source.has_new_config:
        shutil.copyfile(plan.source.folder / "config.json", folder / "config.json")
    else:
        _write_json(folder / "config.json", plan.result.config)
    with tqdm(total=plan.size, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        for path in plan.kept:
            shutil.copyfile(path, folder / path.name)
            bar.update(path.stat().st_size)
        write_shards(folder, plan.shards, plan.tensors(), bar.update)
    if len(plan.shards) > 1:
        table = {name: shard for shard, headers in plan.shards.items() for name in headers}
        size = sum(header.stored_bytes for header in plan.result.headers.values())
        index = {"metadata": {"total_size": size}, "weight_map": table}
        _write_json(folder / INDEX, index)
    written = check_folder(folder)
    if written.parsed != plan.result.parsed:
        raise RuntimeError("what was written is not what was planned")


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
