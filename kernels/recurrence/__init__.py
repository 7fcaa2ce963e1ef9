"""The recurrence of linear attention on CPU: KDA, Gated DeltaNet and lightning attention are one."""

from attnres_serve.kernels.recurrence.operator import recurrence

__all__ = ["recurrence"]
