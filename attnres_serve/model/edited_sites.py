"""The sites of a pipeline stage under edits that hold for every token.

Edits are written into the queries and biases that the sites compute with, so that an edited model
runs the same code.  What was loaded is kept, so that other edits can take their place.
"""

from collections.abc import Mapping

from torch import Tensor

from attnres_serve.checkpoints.edited import edited
from attnres_serve.depth.static_edits import SiteEdit
from attnres_serve.model.site_norm import SiteNorm


class EditedSites:
    """Sites that mix, each with a bias, and the edits that are written into them.

    Args:
        sites: those of the stage, by their index; nothing was loaded into them yet.
        edits: of the whole model, by sites' indices.
    """

    def __init__(self, sites: Mapping[int, SiteNorm], edits: Mapping[int, SiteEdit]) -> None:
        self._sites = {index: norm for index, norm in sites.items() if norm.site.mixes}
        self._loaded: dict[int, tuple[Tensor, Tensor]] = {}
        self.edits = edits

    def keep(self) -> None:
        """Take what the sites hold for what was loaded, and ``change`` to the same edits."""
        self._loaded = {}
        for index, norm in self._sites.items():
            assert norm.bias is not None, "a model with edits has a bias at every site"
            self._loaded[index] = norm.query.detach().clone(), norm.bias.detach().clone()
        self.change(self.edits)

    def change(self, edits: Mapping[int, SiteEdit]) -> None:
        """Let the sites have these edits and no others.

        Args:
            edits: of the whole model, by sites' indices.

        Raises:
            SettingError: they leave a site no source with its loaded bias; nothing was changed.
        """
        made = {
            index: edited(edits[index], *loaded, self._sites[index].site.name)
            if index in edits
            else loaded
            for index, loaded in self._loaded.items()
        }
        for index, (query, bias) in made.items():  # in place: graphs read these addresses
            norm = self._sites[index]
            norm.query.data.copy_(query)
            assert norm.bias is not None
            norm.bias.data.copy_(bias)
        self.edits = edits
