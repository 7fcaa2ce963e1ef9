"""The sites of a pipeline stage, which replace a decoder's norms."""

from collections.abc import Sequence

from torch import nn

from attnres_serve.compat import decoder, host
from attnres_serve.depth import groups as site_groups
from attnres_serve.depth.sites import Site, sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.kernels.interface import Backend, BankSlot, slot_of
from attnres_serve.model.sharded_site import Division, ShardedSite
from attnres_serve.model.site_context import SiteContext
from attnres_serve.model.site_norm import SiteNorm


def install_sites(
    model: nn.Module,
    spec: AttnResSpec,
    algorithm: str,
    backend: Backend,
    tokens: int,
    division: Division | None = None,
) -> dict[int, SiteNorm]:
    """Replace every norm of this pipeline stage by a ``SiteNorm``.

    Args:
        model: vLLM's decoder, with ``start_layer`` and ``end_layer``.
        spec: its depth attention.
        algorithm: one of ``settings.ALGORITHMS``.
        backend: what computes the sites.
        tokens: the maximum tokens of one step on a worker.
        division: the division of the tokens over workers; None if they are not divided.

    Returns:
        The sites of this stage by index.

    Raises:
        CheckpointError: a norm is not an RMSNorm.
    """
    has_final = not decoder.is_elsewhere(model.get_submodule(spec.layout.final_norm))
    # Some decoders have the norm on every stage.
    has_final &= model.end_layer == spec.layout.num_layers
    norms: dict[Site, nn.Module] = {}
    for site in sites(spec):
        is_here = has_final
        if site.layer is not None:
            is_here = model.start_layer <= site.layer < model.end_layer
        if is_here:
            norms[site] = model.get_submodule(site.norm)
            _require_rms_norm(norms[site], site)
    a_norm = next(iter(norms.values()))
    itemsize, in_place = a_norm.weight.element_size(), backend.IN_PLACE
    most = site_groups.most_sites(tokens, a_norm.weight.numel(), itemsize, in_place)
    received = rows_received(spec, next(iter(norms)).index)
    contexts = site_contexts(list(norms), algorithm, backend, most, has_final, received)
    installed: dict[int, SiteNorm] = {}
    later: tuple[SiteNorm, ...] = ()
    for context in reversed(contexts):  # a site refers to the later ones
        site = context.site
        arguments = norms[site], context, spec, later
        norm = SiteNorm(*arguments) if division is None else ShardedSite(division, *arguments)
        model.set_submodule(site.norm, norm)
        installed[site.index] = norm
        if site.mixes:
            later = norm.ahead
    installed[max(installed)].count_passes()
    return dict(sorted(installed.items()))


def _require_rms_norm(norm: nn.Module, site: Site) -> None:
    if not decoder.is_plain_norm(norm):
        raise CheckpointError(
            f"the norm before {site.name} is vLLM's {type(norm).__name__}; AttnRes is served with "
            "RMSNorm and GemmaRMSNorm over whole rows only."
        )


def site_contexts(
    stage: Sequence[Site],
    algorithm: str,
    backend: Backend,
    most: int,
    has_final: bool,
    received: int,
) -> list[SiteContext[Backend]]:
    """The contexts of a pipeline stage's sites.

    Args:
        stage: its sites, in the order in which they run.
        algorithm: one of ``settings.ALGORITHMS``.
        backend: what computes the sites.
        most: the maximum sites that share a phase 1, see ``groups.most_sites``.
        has_final: whether it is the last stage.
        received: rows of the state that the stage receives, see ``rows_received``.
    """
    mixing = [site for site in stage if site.mixes and site.index > 0]
    groups = site_groups.phase_1_groups(mixing, most) if algorithm == "two_phase" else []
    if groups and max(map(len, groups)) == 1:
        host.logger().warning(
            "AttnRes: no two sites of this pipeline stage gain from a common phase 1, so with "
            "two_phase every site is a single pass."
        )
    shared = {
        site: (len(group), position) for group in groups for position, site in enumerate(group)
    }
    bank_slots = _bank_slots(stage, mixing, groups, received)
    slots = max(site.num_sources for site in stage)
    contexts = []
    for site, bank_slot in zip(stage, bank_slots, strict=True):
        group, position = shared.get(site, (1, 0))
        contexts.append(
            SiteContext(
                site=site,
                algorithm=algorithm,
                backend=backend,
                group=group,
                position=position,
                bank_slot=bank_slot,
                slots=slots,
                enters_stage=site is stage[0] and site.index > 0,
                leaves_stage=site is stage[-1] and not has_final,
            )
        )
    return contexts


def _bank_slots(
    stage: Sequence[Site],
    mixing: Sequence[Site],
    groups: Sequence[Sequence[Site]],
    received: int,
) -> list[BankSlot]:
    """The bank slots of a stage's sites; see ``site_contexts``."""
    known: dict[
        Site, tuple[int, int]
    ] = {}  # the first row that phase 1 lacks, number of the answer
    for group in groups:
        for number, site in enumerate(group[1:]):
            known[site] = group[0].num_blocks, number
    bank_slots, rows = [], received
    for site in stage:
        row = site.num_sources - 1
        position = mixing.index(site) if site in mixing else 0
        bank_slots.append(slot_of(row, row == rows, position, *known.get(site, (0, 0))))
        rows = site.num_sources
    return bank_slots


def rows_received(spec: AttnResSpec, first_site: int) -> int:
    """Rows of the packed state that a pipeline stage receives: the sources of the site before."""
    return sites(spec)[first_site - 1].num_sources if first_site else 1
