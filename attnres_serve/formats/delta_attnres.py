"""delta-attnres, its modes ``block`` and ``full``: ``qwen3_attnres`` and ``llama_attnres``.

These two modes are the paper's Block and Full AttnRes with a final mix.
"""

import re
from functools import partial

from attnres_serve.formats import attnres_mode
from attnres_serve.formats.format import Format
from attnres_serve.formats.prefixes import Prefixes

NAME = "delta_attnres"
MARK = re.compile(r"^model\.final_res_(proj|norm)\.")  # a tensor that open-attnres does not have
KEY = "attnres_use_null_source"  # a key that open-attnres does not write
BLOCKS = attnres_mode.BLOCKS

matches = partial(attnres_mode.matches, model_types=("qwen3_attnres", "llama_attnres"))
translate = partial(attnres_mode.translate, name=NAME)
_NAMES = Prefixes(attnres_mode.QUERIES, ("model.final_res_", "model.output_attn_res_"))
rename, stored_name = _NAMES.rename, _NAMES.stored_name


FORMAT = Format(NAME, BLOCKS, matches, translate, rename, stored_name, mark=MARK, distinct_key=KEY)
