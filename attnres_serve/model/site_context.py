"""What a norm knows of its place in a pipeline stage, made before the norm."""

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from attnres_serve.depth.sites import Site
from attnres_serve.kernels.interface import Backend, BankSlot, SiteWeights

B = TypeVar("B", bound=Backend)


class Learned(Protocol):
    """The holder of a site's parameters, which are read anew in every pass."""

    def site_weights(self) -> SiteWeights:
        """The arguments of the backend's functions that the site has learned."""


@dataclass(frozen=True)
class SiteContext(Generic[B]):
    """A site and its place among the sites of its pipeline stage.

    Attributes:
        site: its description.
        algorithm: one of ``settings.ALGORITHMS``.
        backend: the functions that compute it.
        group: how many sites share its phase 1, this one among them; 1 if it has none.
        position: of this site in its group.
        bank_slot: where it works in a bank of the stage.
        slots: rows that such a bank needs.
        enters_stage: whether it is the first site of a stage that is not the first stage.
        leaves_stage: whether it is the last site of a stage that is not the last stage.
    """

    site: Site
    algorithm: str
    backend: B
    group: int
    position: int
    bank_slot: BankSlot = field(compare=False)  # it holds a tensor, and follows from the rest
    slots: int
    enters_stage: bool
    leaves_stage: bool
