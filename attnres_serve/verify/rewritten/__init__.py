"""Hugging Face's own model in float64, made an AttnRes model from outside.

It judges every family that Hugging Face has, whatever its sublayers compute. It imports nothing
else of ours but the hand-written oracle, whose equations of the mix it shares.
"""

from attnres_serve.verify.rewritten.model import Rewritten, Site
from attnres_serve.verify.rewritten.read import load

__all__ = ["Rewritten", "Site", "load"]
