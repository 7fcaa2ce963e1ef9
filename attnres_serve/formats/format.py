"""What a module must have to be a checkpoint format."""

from typing import Any, NamedTuple, Protocol

from attnres_serve.formats.parsed_config import ParsedConfig

UNREAD = "unread."  # before the names that ``rename`` gives to what the format's code never reads


class Blocks(NamedTuple):
    """How a format states where blocks begin.

    Attributes:
        key: of config.json, at its top or in an object that the format keeps it in.
        unit: what its number counts: the ``sublayers`` or ``layers`` of a block, or the ``blocks``.
    """

    key: str
    unit: str


class Format(Protocol):
    """A format module.

    Where a format fuses weights, it also has ``parts(name)``: names, for ``rename``, of the equal
    parts that a tensor holds one after the other along dimension 0; the name itself for one that is
    not fused.  Formats that claim the same config.json also have ``MARK``, a pattern of tensor
    names that only one of them has, and ``KEY``, a key of config.json that only one of them writes.
    ``LACKS_FIRST_SITE`` is true in one that stores nothing for site 0, which has one source alone.
    ``NATIVE`` says how a vLLM is known that serves the format by itself (``compat.native``).
    ``OWN_LAYER_NAMES`` is how a sentence calls a format whose linear layers have other names than
    the family's.

    Attributes:
        NAME: how the format is called in logs and in ``GET /v1/attn_res``.
        BLOCKS: how it states where blocks begin.
    """

    @property
    def NAME(self) -> str: ...

    @property
    def BLOCKS(self) -> Blocks: ...

    def matches(self, config: dict[str, Any]) -> bool:
        """Whether a config.json is of this format.

        Decided by model_type, architectures and keys together, never by one key alone.
        """

    def translate(self, config: dict[str, Any]) -> ParsedConfig:
        """The family, its Hugging Face config and the AttnRes specification.

        Raises:
            CheckpointError: for AttnRes that cannot be served exactly.
        """

    def rename(self, name: str) -> str:
        """A tensor's name in the house format: the family's names plus Kimi's."""

    def own_name(self, name: str) -> str:
        """The name in this format of the tensor that holds a weight, by the weight's house name."""
