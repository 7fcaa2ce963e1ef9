"""What a kernel may not do, and what the emulator does not know."""


class PtxError(Exception):
    """Any of them; the message begins with the instruction."""


class UnknownInstructionError(PtxError):
    """An instruction, modifier, operand or directive that has no meaning here."""


class OutOfBoundsError(PtxError):
    """An access outside the rows of every tensor, or outside shared memory."""


class MisalignedError(PtxError):
    """An access at an address that is no multiple of its size."""


class RaceError(PtxError):
    """Two warps, or two programs, touch the same bytes in no order, and one of them writes."""


class DivergenceError(PtxError):
    """A branch that some threads of a program take and others do not."""


class EarlyAccessError(PtxError):
    """An access to global memory before the wait of an early launch."""
