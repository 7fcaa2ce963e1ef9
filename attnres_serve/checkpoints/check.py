"""``attnres-serve check``: describe what would be served, from config.json and headers alone."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from attnres_serve import formats
from attnres_serve.checkpoints import cache, draft, hub, needs
from attnres_serve.checkpoints.base_tensors import is_left_over
from attnres_serve.checkpoints.checked import Checkpoint, check_folder
from attnres_serve.checkpoints.files import Header
from attnres_serve.checkpoints.names import (
    is_draft,
    is_of_images,
    is_unread,
    site_of,
)
from attnres_serve.compat import native
from attnres_serve.depth import blocks
from attnres_serve.depth.sites import sites
from attnres_serve.errors import CheckpointError, SettingError
from attnres_serve.families import FAMILIES
from attnres_serve.formats import house
from attnres_serve.sentences import amount

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# Options of a specification, with labels for people; shown if they differ from the default.
OPTIONS = {
    "cumulative": "cumulative sums",
    "recency_bias": "recency bias",
    "source_bias": "a bias for every source",
    "logit_scale": "logit scale {}",
    "shared_queries": "one query for every {}",
}
DRAFTS = """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
NO_TEMPLATE = "none; for chats, give `serve` one with --chat-template FILE"
ATTNRES_BYTES = 4  # queries, key norms and biases are served in float32


def check(name: str, as_json: bool) -> None:
    """Print a description of what would be served.

    Args:
        name: a folder, or a model id whose files are in the Hugging Face cache.
        as_json: print one JSON object, with a reason if the checkpoint cannot be served.

    Raises:
        CheckpointError: it cannot be served as its config.json describes.
        SettingError: a variable states a cache that does not fit on this machine.
    """
    facts: dict[str, Any] = {}
    try:
        folder = hub.on_this_machine(name)
        checkpoint = check_folder(folder)
        parsed = checkpoint.translated(name)
        facts = describe(checkpoint) | needs.tokenizer_facts(folder) | _class(parsed.format)
        needs.check(name, parsed, folder)
        needs.check_quantized(name, checkpoint.index)
        facts |= _cache(cache.of(name, parsed))
    except (CheckpointError, SettingError) as error:
        if as_json:
            print(json.dumps({"checkpoint": name, "served": False, "reason": str(error), **facts}))
        elif facts:
            print(f"{name} has the right tensors, but cannot be served here.\n\n{render(facts)}")
        raise
    if as_json:
        print(json.dumps({"checkpoint": name, "served": True, **facts}))
    else:
        print(f"{name} can be served.\n\n{render(facts)}\n\nServe it: {needs.serve_command(name)}")


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts about a checked checkpoint.

    Sizes are in bytes, except ``block_size``, a text. ``notes`` are warnings about unusual blocks.
    ``stored_dtype`` is ``mixed`` if there are several ``stored_dtypes``; the one with most bytes
    comes first.

    * ``weights_bytes``: memory for the weights as served.
    * ``bank_bytes_per_token``: memory per token of a step for the finished blocks and the partial
      sum, at the site that reads most of them.
    * ``bank_bytes_of_8192_tokens``: the same for a step of 8192 tokens, by the number of
      tensor-parallel workers that share it (``--attnres-shard-sites on``).
    * ``kv_cache_bytes_per_token``: memory of the KV cache per token of the context.
    * ``state_bytes_per_sequence``: memory for the recurrent state of a sequence.
    * ``parameters`` and ``active_parameters``, which leaves out experts that a token does not see:
      None for quantised weights, whose elements are not parameters.
    * ``left_aside``: the number of tensors that predict further tokens; only drafts use them.
      ``draft_head`` says whether drafts are possible.
    * ``images``: the number of tensors that read images, which are not served.
    """
    parsed = checkpoint.parsed
    assert parsed is not None, "only an AttnRes checkpoint has these facts"
    config, spec = parsed.config, parsed.spec
    quantised = bool(config.get("quantization_config"))
    site_headers, family_headers, drafts = _split(checkpoint)
    rename = formats.by_name(parsed.format).rename
    elements = sum(header.elements for header in family_headers)
    attnres = sum(header.elements for header in site_headers)
    dtype = served_dtype(config, family_headers)
    stored = sum(header.stored_bytes for header in family_headers)
    types = stored_dtypes([*family_headers, *site_headers])
    all_sites = sites(spec) if spec else ()
    rows = max((site.num_sources for site in all_sites), default=0)
    family = FAMILIES[parsed.family]
    bank = rows * config["hidden_size"] * BYTES[dtype]
    return {
        "format": parsed.format,
        "backbone": parsed.family,
        "architecture": family.architecture,
        "hidden_size": config["hidden_size"],
        "head_size": family.head_size(config),
        "layers": config["num_hidden_layers"],
        "vocabulary": config["vocab_size"],
        "context": needs.context(config),
        "blocks": spec.num_blocks if spec else 0,
        "block_starts": list(spec.block_starts) if spec else [],
        "block_size": blocks.size(spec) if spec else None,
        "notes": blocks.notes(spec) if spec else [],
        "final_mix": spec.final_mix if spec else None,
        **{name: getattr(spec, name) if spec else None for name in OPTIONS},
        "edits": house.edits(checkpoint.config) if parsed.format == house.NAME else [],
        "sites": len(all_sites),
        "sources": rows,
        "parameters": None if quantised else elements + attnres,
        "active_parameters": None
        if quantised
        else elements + attnres - family.idle_elements(config),
        "attnres_parameters": attnres,
        "left_aside": drafts,
        "images": sum(is_of_images(rename(name)) for name in checkpoint.headers),
        "unread": [name for name in checkpoint.headers if is_unread(rename(name))],
        "draft_head": bool(drafts) and not draft.head_problem(parsed, checkpoint.index),
        "stored_dtype": types[0] if len(types) == 1 else "mixed",
        "stored_dtypes": types,
        "quantised": quantised,
        "dtype": dtype,
        "weights_bytes": (stored if quantised else elements * BYTES[dtype])
        + ATTNRES_BYTES * attnres,
        "bank_bytes_per_token": bank,
        "bank_bytes_of_8192_tokens": {str(n): bank * 8192 // n for n in (1, 2, 4, 8)},
        "kv_cache_bytes_per_token": family.cache_elements(config) * BYTES[dtype],
        "state_bytes_per_sequence": family.state_bytes(config, BYTES[dtype]),
    }


def _class(format_name: str) -> dict[str, str]:
    """Whose class serves a format for which vLLM has a class too, and why."""
    native_class = formats.by_name(format_name).native
    return {} if native_class is None else {"served_by": native.served_by(native_class)}


def _cache(kv_cache: cache.Cache | None) -> dict[str, Any]:
    """The facts about the cache of ``serve`` on this machine; empty if unknown."""
    if kv_cache is None:
        return {}
    return {"cache": str(kv_cache), "cache_bytes": kv_cache.size, "cache_tokens": kv_cache.tokens}


def _split(checkpoint: Checkpoint) -> tuple[list[Header], list[Header], int]:
    """The headers of AttnRes tensors and of other weights, and the number of draft tensors."""
    parsed = checkpoint.parsed
    assert parsed is not None
    rename, layout = formats.by_name(parsed.format).rename, parsed.layout
    site_headers, family_headers, drafts = [], [], 0
    for name, header in checkpoint.headers.items():
        house = rename(name)
        drafts += is_draft(house, parsed.config)
        if site_of(house, layout):
            site_headers.append(header)
        elif not is_left_over(house, parsed.config):
            family_headers.append(header)
    return site_headers, family_headers, drafts


def stored_dtypes(headers: Iterable[Header]) -> list[str]:
    """The types of the weights, the one with most bytes first."""
    totals: dict[str, int] = {}
    for header in headers:
        totals[header.dtype] = totals.get(header.dtype, 0) + header.stored_bytes
    return [DTYPES.get(name, name) for name in sorted(totals, key=lambda name: -totals[name])]


def served_dtype(config: Mapping[str, Any], headers: list[Header]) -> str:
    """The dtype that vLLM's ``--dtype auto`` chooses on a device with bfloat16."""
    stated = (
        config.get("dtype") or config.get("torch_dtype") or next(iter(stored_dtypes(headers)), "")
    )
    return "float16" if str(stated).removeprefix("torch.") == "float16" else "bfloat16"


def render(facts: Mapping[str, Any]) -> str:
    """The facts as lines for people."""
    block_line = "none (standard residuals)"
    if facts["blocks"]:
        starts = ", ".join(map(str, facts["block_starts"][: facts["blocks"]]))
        block_line = f"{facts['blocks']}, beginning at the sublayers {starts}"
        if facts["blocks"] == facts["sites"] - 1:
            block_line = f"{facts['blocks']}, one for every sublayer (Full AttnRes)"
        if len(facts["block_starts"]) > facts["blocks"]:
            block_line += "; the final site reads the last sum twice"
    options = [
        label.format(facts[name])
        for name, label in OPTIONS.items()
        if facts[name] and (name, facts[name]) != ("logit_scale", 1)
    ]
    parameters = "not counted (quantised)"
    if facts["parameters"] is not None:
        parameters = (
            f"{facts['parameters']:,}, of them {facts['attnres_parameters']:,} of AttnRes itself"
        )
        if facts["active_parameters"] != facts["parameters"]:
            parameters += f"; {facts['active_parameters']:,} active for a token"
    lines = {
        "format": facts["format"],
        "backbone": facts["backbone"],
        "architecture": facts["architecture"],
        "hidden size": f"{facts['hidden_size']}"
        + (f", in heads of {facts['head_size']}" if facts["head_size"] else ""),
        "layers": facts["layers"],
        "blocks": block_line,
        "block size": facts["block_size"],
        "sites": f"{facts['sites']}, of at most {facts['sources']} sources",
        "final mix": "yes" if facts["final_mix"] else "no",
        "variant": ", ".join(options),
        "context": f"{facts['context']} tokens",
        "vocabulary": f"{facts['vocabulary']} tokens",
        "tokenizer": ", ".join(filter(None, map(facts.get, ("tokenizer", "tokenizer_read"))))
        or "none",
        "chat template": "yes" if facts.get("chat_template") else NO_TEMPLATE,
        "parameters": parameters,
        "dtype": f"{_stored(facts)}, served in {facts['dtype']} by default",
        "weights": f"{amount(facts['weights_bytes'])} of memory",
        "block bank": f"{amount(facts['bank_bytes_per_token'])} for every token of a step",
        "KV cache": f"{amount(facts['kv_cache_bytes_per_token'])} for every token of the context",
        "state": f"{amount(facts['state_bytes_per_sequence'])} for every sequence",
    }
    for name, fact in (
        ("KV cache", "kv_cache_bytes_per_token"),
        ("state", "state_bytes_per_sequence"),
    ):
        if not facts[fact]:
            del lines[name]
    if "cache" in facts:
        lines["cache here"] = f"{facts['cache']}, which `serve` takes"
    if "served_by" in facts:
        lines["served by"] = facts["served_by"]
    if facts["left_aside"]:
        draft_tensors = f"{facts['left_aside']} tensors that predict further tokens"
        lines["left aside"] = (
            f"{draft_tensors}; {DRAFTS} uses them" if facts["draft_head"] else draft_tensors
        )
    if facts["unread"]:
        lines["not read"] = f"{', '.join(facts['unread'])}, as by the code that wrote it"
    if facts["images"]:
        lines["no images"] = f"{facts['images']} tensors that read them are left aside"
    if not facts["blocks"]:
        for name in ("block size", "sites", "final mix", "block bank"):
            del lines[name]
    if not options:
        del lines["variant"]
    if "tokenizer" not in facts:  # only those of the tensors
        del lines["tokenizer"], lines["chat template"]
    rows = [
        *lines.items(),
        *(("edited", one) for one in facts["edits"]),
        *(("note", note) for note in facts["notes"]),
    ]
    return "\n".join(f"{name:14}{value}" for name, value in rows)


def _stored(facts: Mapping[str, Any]) -> str:
    *others, last = facts["stored_dtypes"]
    return f"mixed, stored in {', '.join(others)} and {last}" if others else f"stored in {last}"
