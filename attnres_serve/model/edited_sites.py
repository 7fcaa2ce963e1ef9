"""The sites of a pipeline stage under edits that hold for every token.

Edits are written into the queries and biases of the sites, so that an edited model runs the same
code.  The loaded values are kept, so that other edits can replace them.
"""

from collections.abc import Mapping

from torch import Tensor

from attnres_serve.checkpoints.edited import edited
from attnres_serve.depth.static_edits import SiteEdit
from attnres_serve.model.site_norm import SiteNorm


class EditedSites:
    """Mixing sites, each with a bias, and the edits that are written into them.

    Args:
        sites: the sites of the stage by index, before weights are loaded.
        edits: the edits of the whole model, by site index.
    """

    def __init__(self, sites: Mapping[int, SiteNorm], edits: Mapping[int, SiteEdit]) -> None:
        self._sites = {index: norm for index, norm in sites.items() if norm.site.mixes}
        self._loaded: dict[int, tuple[Tensor, Tensor]] = {}
        self.edits = edits

    def keep(self) -> None:
        """Keep the sites' present values as the loaded ones, and write the same edits again."""
        self._loaded = {}
        for index, norm in self._sites.items():
            assert norm.bias is not None, "a model with edits has a bias at every site"
            self._loaded[index] = norm.query.detach().clone(), norm.bias.detach().clone()
        self.change(self.edits)

    def change(self, edits: Mapping[int, SiteEdit]) -> None:
        """Write these edits of the whole model into the sites, instead of all earlier ones.

        Raises:
            SettingError: the edits and a loaded bias leave a site no source; nothing was changed.
        """
        written = dict(self._loaded)
        for index in sorted(edits.keys() & written.keys()):
            written[index] = edited(edits[index], *written[index], self._sites[index].site.name)
        for index, (query, bias) in written.items():  # in place: graphs read these addresses
            norm = self._sites[index]
            norm.query.data.copy_(query)
            assert norm.bias is not None
            norm.bias.data.copy_(bias)
        self.edits = edits
