"""The interface of a checkpoint format's module."""

from typing import Any, NamedTuple, Protocol

from attnres_serve.formats.parsed_config import ParsedConfig

UNREAD = "unread."  # the prefix that ``rename`` gives to tensors that the format's code never reads


class Blocks(NamedTuple):
    """The way in which a format states its blocks.

    Attributes:
        key: a key of config.json, at its top or in an object of the format.
        unit: the unit of its number: the ``sublayers`` or ``layers`` of a block, or the ``blocks``.
    """

    key: str
    unit: str


class Format(Protocol):
    """A format module.

    A format that fuses weights also has ``parts(name)``: names, for ``rename``, of a tensor's equal
    parts along dimension 0; the name itself for a tensor that is not fused.  Formats that match the
    same config.json also have ``MARK``, a pattern of tensor names that only one of them has, and
    ``KEY``, a key of config.json that only one of them writes.  ``LACKS_FIRST_SITE`` is true in one
    that stores nothing for site 0, which has only one source.  ``NATIVE`` is the evidence that a
    vLLM has a class for the format (``compat.native``).  ``OWN_LAYER_NAMES`` is the title of a
    format whose linear layers have other names than the family's.

    Attributes:
        NAME: the format's name in logs and in ``GET /v1/attn_res``.
        BLOCKS: the way in which it states its blocks.
    """

    @property
    def NAME(self) -> str: ...

    @property
    def BLOCKS(self) -> Blocks: ...

    def matches(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this format.

        It depends on model_type, architectures and keys together, never on a single key.
        """

    def translate(self, config: dict[str, Any]) -> ParsedConfig:
        """The family, its Hugging Face config and the AttnRes specification.

        Raises:
            CheckpointError: for AttnRes that cannot be served exactly.
        """

    def rename(self, name: str) -> str:
        """A tensor's name in the house format: the family's names plus Kimi's."""

    def own_name(self, name: str) -> str:
        """This format's name of the tensor that holds a weight, by the weight's house name."""
