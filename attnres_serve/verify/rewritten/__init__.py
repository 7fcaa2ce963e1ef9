"""Hugging Face's model in float64, with AttnRes added by hooks.

It is the reference of every family that Hugging Face has, whatever its sublayers compute. Of this
project it imports only the hand-written oracle, whose equations of the mix it shares.
"""

from attnres_serve.verify.rewritten.model import Rewritten, Site
from attnres_serve.verify.rewritten.read import load

__all__ = ["Rewritten", "Site", "load"]
