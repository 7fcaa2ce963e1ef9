"""The tensors of a checkpoint, checked against those that its model needs.

Both the headers of a checkpoint's files and the weights that stream to a model go through a
``TensorIndex``, so the same rules apply everywhere.
"""

import re
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from attnres_serve.checkpoints.base_tensors import BaseTensors, check_spare_bias
from attnres_serve.checkpoints.names import (
    BUFFER,
    LOOKS_LIKE_ATTNRES,
    PARTS,
    TIED,
    WRAPPER,
    WRAPPERS,
    cut,
    expected_parts,
    is_draft,
    parts_of,
    same_tensor,
    tensor_name,
)
from attnres_serve.checkpoints.renaming.rename import CONVERT_COMMAND, RENAME_OPTION
from attnres_serve.checkpoints.tensors import (
    Stored,
    check_dtype,
    check_part,
    check_shape,
    check_tied,
    part_shapes,
)
from attnres_serve.depth.sites import sites
from attnres_serve.depth.spec import AttnResSpec
from attnres_serve.errors import CheckpointError
from attnres_serve.families import experts
from attnres_serve.families.family import Held, Shape
from attnres_serve.formats import house
from attnres_serve.formats.format import Format
from attnres_serve.formats.refused import variant
from attnres_serve.kernels.interface import MASKED

if TYPE_CHECKING:
    from torch import Tensor


class TensorIndex:
    """The tensors of a checkpoint that have been entered, by house names.

    Attributes:
        base: the tensors that the family needs.
        stored: shape and type of every tensor.
        stored_names: every tensor's name in the checkpoint.
        format: the format of the checkpoint.
    """

    def __init__(
        self,
        checkpoint_format: Format,
        base: BaseTensors,
        spec: AttnResSpec | None,
        takes_house_names: bool = False,
    ) -> None:
        """Start empty.

        Args:
            checkpoint_format: the format of the checkpoint.
            base: the tensors that the family needs.
            spec: the depth attention, None for a model with standard residuals.
            takes_house_names: whether house names are accepted besides the format's.
        """
        self.base, self._takes_house_names = base, takes_house_names
        self.stored: dict[str, Stored] = {}
        self.stored_names: dict[str, str] = {}
        self.format = checkpoint_format
        self._sites = {
            tensor_name(site, part, base.layout): (site, part)
            for site, part in expected_parts(spec)
            if site or not checkpoint_format.lacks_first_site
        }
        biased = sites(spec) if spec is not None and spec.source_bias else ()
        self._sources = {site.index: site.num_sources for site in biased}
        self._tied: dict[str, Tensor] = {}

    @cached_property
    def expected(self) -> dict[str, tuple[int, str] | None]:
        """The house names of all weights, with site and part for those of a site."""
        return dict.fromkeys(self.base.needed) | self._sites

    def weights_of(self, stored_name: str) -> list[str]:
        """The house names of the weights in a tensor; empty if its name is unknown.

        Args:
            stored_name: its name in the checkpoint.

        Raises:
            CheckpointError: its name is a buffer's, or has a wrapper's or another prefix.
        """
        self._refuse_no_name(stored_name)
        if (held := self._held(stored_name)) is not None:
            return [*held.parts]
        names = self._names_of(stored_name)
        weights = [names.rename(part) for part in names.fused_parts(stored_name)]
        if all(one in self.expected or self.base.is_known(one) for one in weights):
            return weights
        self._refuse_prefix(stored_name)
        return []

    def shapes_of(self, name: str) -> tuple[Shape, ...]:
        """The allowed shapes of the format's tensor that holds a weight.

        Args:
            name: the house name of the weight, or of the first of several.
        """
        if site := self.expected[name]:
            hidden, sources = self.base.config["hidden_size"], self._sources.get(site[0])
            return part_shapes(site[1], hidden, sources)
        shape = self.base.needed[name]
        count = len(self.format.fused_parts(self.format.stored_name(name)))
        return (shape if count == 1 else (count * shape[0], *shape[1:]),)

    def take(self, stored_name: str, stored: Stored) -> dict[str, tuple[int, str] | None]:
        """Enter a tensor and check it.

        Args:
            stored_name: its name in the checkpoint.
            stored: its shape and type.

        Returns:
            The house names of its parts, several if the format fuses weights or it is from a
            ``state_dict``, each with its site and its part (a key of ``PARTS``), or None if it
            belongs to no site.

        Raises:
            CheckpointError: it is left over, has a wrong shape or an unsupported type, or is a
                second tensor for the same weight.
        """
        names = self.enter(stored_name, stored)
        for name in names:
            self.check(name)
        return {name: self._sites.get(name) for name in names}

    def enter(self, stored_name: str, stored: Stored) -> list[str]:
        """Enter a tensor after checking only its name and that it is not quantised.

        Args:
            stored_name: its name in the checkpoint.
            stored: its shape and type.

        Returns:
            The house names of its parts, like ``take``.

        Raises:
            CheckpointError: its name is a buffer's or has a wrapper's prefix, its parts are not
                equal, its type is unsupported, it is a second tensor for the same weight, an
                AttnRes tensor without a site, or packs experts in an unknown way.
        """
        self._refuse_no_name(stored_name)
        if not self.base.quantisation:
            check_dtype(stored_name, stored.dtype)
        names = []
        for name, part, shape in self._parts(stored_name, stored.shape):
            if name in self.stored_names:
                raise CheckpointError(same_tensor(self.stored_names[name], part))
            is_known = name in self._sites or is_draft(name, self.base.config)
            if not is_known and LOOKS_LIKE_ATTNRES.search(name):
                self._refuse_prefix(part)
                raise CheckpointError(
                    f"the checkpoint holds the AttnRes tensor {part}{variant(part)}, for which its "
                    "configuration has no site; the configuration and the weights do not belong "
                    "together."
                )
            self.stored[name], self.stored_names[name] = Stored(shape, stored.dtype), part
            names.append(name)
        return names

    def _parts(self, stored_name: str, shape: Shape) -> Iterator[tuple[str, str, Shape]]:
        """The parts of a tensor: house name, stored name, shape."""
        if (held := self._held(stored_name)) is not None:
            check_shape(stored_name, shape, held.shape)
            yield from ((name, stored_name, part) for name, part in held.parts.items())
            return
        names = self._names_of(stored_name)
        for part, its_shape in parts_of(names, stored_name, shape).items():
            yield names.rename(part), part, its_shape

    def _held(self, stored_name: str) -> Held | None:
        name = self._names_of(stored_name).rename(stored_name)
        return None if name in self._sites else self.base.held(stored_name, name)

    def _names_of(self, stored_name: str) -> Format:
        """The format of a tensor's name.

        A name in both the house format and the checkpoint's format means the same in both.
        """
        is_of_house = (
            stored_name in self._sites
            or stored_name in self.base.needed
            or experts.is_packed(stored_name)
        )
        return house.FORMAT if self._takes_house_names and is_of_house else self.format

    def pieces(self, stored_name: str, tensor: "Tensor") -> Iterator[tuple[str, "Tensor"]]:
        """The parts of a tensor by their house names, in the order of ``take``.

        Args:
            stored_name: its name in the checkpoint.
            tensor: the tensor, of the shape that ``take`` got.
        """
        if (held := self._held(stored_name)) is not None:
            unpacked = held.unpack(tensor)
            yield from ((name, unpacked[name]) for name in held.parts)
            return
        names = self._names_of(stored_name)
        parts = parts_of(names, stored_name, tuple(tensor.shape))
        yield from zip(map(names.rename, parts), cut(tensor, len(parts)), strict=True)

    def _refuse_no_name(self, stored_name: str) -> None:
        """Raise CheckpointError for a name with a wrapper's prefix, or the name of a buffer."""
        if match := WRAPPER.search(stored_name):
            prefix = match["prefix"]
            raise CheckpointError(
                f"the tensor {stored_name} has {prefix!r} in its name, of a wrapper "
                f"({WRAPPERS[prefix]}) and not of the model; save the model that is wrapped, or "
                "take it out of every name: "
                f"{{name.replace({prefix!r}, ''): tensor for name, tensor in state.items()}}."
            )
        if BUFFER.search(stored_name) and self.format.rename(stored_name) not in self.base.needed:
            raise CheckpointError(
                f"the tensor {stored_name} is a buffer (a mask or a rotary table), which is made "
                "anew and is no weight; remove it from the file."
            )

    def _refuse_prefix(self, stored_name: str) -> None:
        """Raise CheckpointError if a name without a prefix belongs to a site."""
        for dot in re.finditer(r"\.", stored_name):
            prefix, rest = stored_name[: dot.end()], stored_name[dot.end() :]
            if self.format.rename(rest) in self._sites:
                raise CheckpointError(
                    f"the tensor {stored_name} is {rest} with {prefix!r} before its name, of a "
                    "module around the model; save that model alone, or take it out of every name: "
                    f"{{name.removeprefix({prefix!r}): tensor for name, tensor in state.items()}}, "
                    f"or `{CONVERT_COMMAND} {RENAME_OPTION} '{prefix}*=*'`."
                )

    def check(self, name: str) -> None:
        """Check an entered tensor.

        Args:
            name: its house name.

        Raises:
            CheckpointError: it is left over, or has a wrong shape or an unsupported type.
        """
        stored_name, stored = self.stored_names[name], self.stored[name]
        if name in self._sites:
            check_part(
                stored_name, stored, *self._sites[name], self.base.layout, self.shapes_of(name)
            )
        else:
            self.base.check(name, stored_name, stored)

    def close(self, here: Callable[[str], bool] = lambda name: True) -> None:
        """Check that all tensors of the model have been entered.

        Args:
            here: whether this pipeline stage needs a tensor, by its house name.

        Raises:
            CheckpointError: a tensor is missing, an AttnRes tensor has a wrong shape, or a
                quantised layer is incomplete.
        """
        for name, (site, part) in self._sites.items():
            if not here(name):
                continue
            if name not in self.stored:
                raise CheckpointError(
                    f"the checkpoint lacks the {PARTS[part]} of {self.base.layout.site_name(site)} "
                    f"({name} in house names); a missing one is never taken as zero, so save the "
                    "model with all of them."
                )
            self.check(name)
        self.base.check_whole(self.stored, self.stored_names, here)

    def has_telling_values(self, name: str) -> bool:
        """Whether values, not only name and shape, decide if a tensor fits config.json.

        Args:
            name: the house name of an entered tensor.
        """
        if name in TIED:
            return self.base.is_tied and len(self.stored.keys() & {*TIED}) == 2
        return self.base.is_spare_bias(name) or self._is_source_bias(name)

    def _is_source_bias(self, name: str) -> bool:
        return bool(self._sources) and name in self._sites and self._sites[name][1] == "bias"

    def check_values(self, name: str, tensor: "Tensor") -> None:
        """Check the values of an entered tensor, if they matter.

        Args:
            name: its house name.
            tensor: the tensor, of any shape and dtype.

        Raises:
            CheckpointError: the head is tied to the embedding and has other values, a bias that
                the model does not have is not zero, or the bias of a site masks every source.
        """
        if name in TIED and self.base.is_tied:
            # A loader may free the first of the two with its file.
            self._tied[name] = tensor.to("cpu", copy=not self._tied)
            check_tied(self._tied)
        elif self.base.is_spare_bias(name):
            check_spare_bias(self.stored_names[name], tensor)
        elif self._is_source_bias(name) and bool((tensor <= MASKED).all()):
            raise CheckpointError(
                f"{self.stored_names[name]} leaves out every source of a site, as all its numbers "
                f"are {MASKED:g}; expected another one for a source that is read."
            )
