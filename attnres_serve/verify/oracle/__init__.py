"""An independent float64 evaluation of AttnRes language models.

It imports nothing else of this project.
"""

from attnres_serve.verify.oracle.formats import BASES, add_depth, spec_of
from attnres_serve.verify.oracle.model import Model, threads_for
from attnres_serve.verify.oracle.names import HOUSE_NAMES, depth_names
from attnres_serve.verify.oracle.norm import rms_norm
from attnres_serve.verify.oracle.read import depth_shapes, load, read_weights
from attnres_serve.verify.oracle.spec import (
    Place,
    Spec,
    alike,
    site_role,
    source_spans,
    starts_of,
)

__all__ = [
    "BASES",
    "HOUSE_NAMES",
    "Model",
    "Place",
    "Spec",
    "add_depth",
    "alike",
    "depth_names",
    "depth_shapes",
    "load",
    "read_weights",
    "rms_norm",
    "site_role",
    "source_spans",
    "spec_of",
    "starts_of",
    "threads_for",
]
