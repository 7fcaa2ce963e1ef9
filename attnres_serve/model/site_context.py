"""The place of a norm in a pipeline stage, made before the norm."""

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from attnres_serve.depth.sites import Site
from attnres_serve.kernels.interface import Backend, BankSlot, SiteWeights

B = TypeVar("B", bound=Backend)


class Learned(Protocol):
    """The holder of a site's parameters, which are read in every pass."""

    def site_weights(self) -> SiteWeights:
        """The site's parameters as arguments of the backend's functions."""


@dataclass(frozen=True)
class SiteContext(Generic[B]):
    """A site and its place among the sites of its pipeline stage.

    Attributes:
        site: its description.
        algorithm: one of ``settings.ALGORITHMS``.
        backend: the functions that compute it.
        group: number of the sites that share its phase 1, including this one; 1 without a phase 1.
        position: its position in the group.
        bank_slot: its slot in a bank of the stage.
        slots: number of rows of such a bank.
        enters_stage: whether it is the first site of a stage that is not the first stage.
        leaves_stage: whether it is the last site of a stage that is not the last stage.
    """

    site: Site
    algorithm: str
    backend: B
    group: int
    position: int
    bank_slot: BankSlot = field(compare=False)  # a tensor, and determined by the other fields
    slots: int
    enters_stage: bool
    leaves_stage: bool
