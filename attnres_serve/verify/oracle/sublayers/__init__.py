"""The kinds of sublayers, one a file."""

from attnres_serve.verify.oracle.sublayers.attention import Attention
from attnres_serve.verify.oracle.sublayers.gated_attention import GatedAttention
from attnres_serve.verify.oracle.sublayers.mlp import MLP
from attnres_serve.verify.oracle.sublayers.sublayer import Sublayer, Weights

__all__ = ["MLP", "Attention", "GatedAttention", "Sublayer", "Weights"]
