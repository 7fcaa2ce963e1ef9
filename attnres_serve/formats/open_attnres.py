"""open-attnres: ``qwen3_attnres`` with a cumulative residual stream and recency biases.

The embedding is both block 0 and the first partial sum, which is never reset.  After the last MLP
of a block, or in the mode ``full`` after every sublayer, a copy of the sum becomes a finished
block. The sum itself stays the last source, with a learned bias on its score.  The last norm reads
the sum.
"""

import re
from functools import partial

from attnres_serve.formats import attnres_mode
from attnres_serve.formats.format import Format
from attnres_serve.formats.prefixes import Prefixes

NAME = "open_attnres"
MARK = re.compile(r"\.(attn|mlp)_res_bias$")  # a tensor that delta-attnres does not have
KEY = "attnres_recency_bias_init"  # a key that delta-attnres does not write
BLOCKS = attnres_mode.BLOCKS

matches = partial(attnres_mode.matches, model_types=("qwen3_attnres",))
translate = partial(
    attnres_mode.translate, name=NAME, final_mix=False, cumulative=True, recency_bias=True
)
_NAMES = Prefixes(attnres_mode.QUERIES)
rename, stored_name = _NAMES.rename, _NAMES.stored_name


FORMAT = Format(NAME, BLOCKS, matches, translate, rename, stored_name, mark=MARK, distinct_key=KEY)
