"""Linear attention on CPU: one recurrence for KDA, Gated DeltaNet and lightning attention."""

from attnres_serve.kernels.recurrence.convolution import short_convolution
from attnres_serve.kernels.recurrence.operator import recurrence

__all__ = ["recurrence", "short_convolution"]
