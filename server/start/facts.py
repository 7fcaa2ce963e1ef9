"""The facts about a server at the beginning of its start."""

from attnres_serve import __version__
from attnres_serve.checkpoints.cache import Cache
from attnres_serve.compat import device, versions
from attnres_serve.depth.sites import sites
from attnres_serve.families import FAMILIES
from attnres_serve.families.limits import Limit
from attnres_serve.formats.parsed_config import ParsedConfig


def title() -> str:
    """Name and version of this package and of vLLM."""
    on = " on CPU" if device.is_cpu() else ""
    return f"attnres-serve {__version__}, vLLM {versions.installed()[1]}{on}"


def of_checkpoint(name: str, parsed: ParsedConfig, cache: Cache | None) -> dict[str, str]:
    """The name of a checkpoint, the layout of its residuals, and its caches."""
    spec = parsed.spec
    layout = f"format {parsed.format}, family {parsed.family}, "
    if spec is None:
        layout += "standard residuals"
    else:
        full = " (Full AttnRes)" if spec.is_full else ""
        layout += (
            f"{spec.num_blocks} blocks over {spec.num_sublayers} sublayers{full}, "
            f"{len(sites(spec))} sites"
        )
    facts = {"model": name, "layout": layout} | ({"KV cache": str(cache)} if cache else {})
    return facts | _prefixes(parsed)


def _prefixes(parsed: ParsedConfig) -> dict[str, str]:
    """Why prefixes of prompts are not cached; empty if they are."""
    family = FAMILIES[parsed.family]
    if not family.cache_elements(parsed.config):
        return {"prefixes": "not cached, as vLLM has no such cache for models without attention"}
    if device.is_cpu() and Limit.PREFIX_CACHING in family.limits:
        return {"prefixes": "not cached, as vLLM cannot continue those of this family on a CPU"}
    return {}
