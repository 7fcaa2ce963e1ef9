"""Writes ``replaced.md`` beside this file from the patches that the package states.

python docs/use/replaced.py
"""

from pathlib import Path

from attnres_serve.compat import patches

PAGE = Path(__file__).with_name("replaced.md")
HEAD = """\
<!-- Written by replaced.py from the patches of the package. -->

# What is replaced in vLLM and torch

No file of vLLM or torch is changed. The plugin replaces these functions in the memory of a
running process, most of them only where an AttnRes model is built. A process that serves another
model keeps vLLM's. A replacement is removed with the first vLLM or torch that does not need it.

"""
MIDDLE = """
The files are in `attnres_serve/compat/workarounds/`, `openai_app.py`, `registry.py` and
`token_counts.py` in `attnres_serve/compat/`. A version that was tested and lacks one of these
names is refused by a sentence, and one that was not serves on with a warning. If another plugin
has replaced the same thing before, a warning names it.

Without a patch of their own:

| what | file | why | for which models |
|---|---|---|---|
"""
# What has no patch of its own: what, file, why, for which models.
OTHERS = (
    (
        "`finalize_loading` is added to `BundledAOTAutogradSerializableCallable` of torch",
        "`compiled_code.py`",
        "compiled code was not loaded from the cache",
        "compiled AttnRes models on CPU",
    ),
    (
        "OpenMP's number of threads",
        "`numba_threads.py`",
        "n-gram drafts left torch one thread "
        "([report](../build/upstream/threads-beside-n-grams-on-cpu.md))",
        "AttnRes models on CPU with `--speculative-config`",
    ),
    (
        "the backend `CPU_MLA`, by vLLM's `register_backend`",
        "`mla_backend.py`",
        "`CPU_MLA` computes rows of one size",
        "AttnRes models on CPU",
    ),
    (
        "the validators that read bodies, of one app's routes",
        "`server/bounds/fail_fast.py`",
        "a body that is wrong in many places took long",
        "every model of our server",
    ),
    (
        "`_maybe_add_hidden_state` of one model's decoder",
        "`model/causal_lm.py`",
        "heads of EAGLE's kind read another stream",
        "AttnRes models with such drafts",
    ),
    (
        "`reduce_results` of one model's row-parallel layers",
        "`token_shards.py`",
        "sums are shared out with the tokens",
        "AttnRes models with `--attnres-shard-sites on`",
    ),
    (
        "classes in a module of vLLM's, while a model is built of them",
        "`model/swapped_classes.py`",
        "vLLM's model builds our layers",
        "Kimi, AliceAI, Granite",
    ),
    (
        "entries of `sys.modules`, while a module is imported",
        "`bare_package.py`",
        "a package imports what a CPU cannot run",
        "some families on CPU",
    ),
    (
        "inductor's table of generated calls",
        "`kernels/cpp/direct.py`",
        "compiled code calls sites directly",
        "compiled AttnRes models on CPU",
    ),
)
TAIL = """
The plugin also fills tables that vLLM provides for this purpose: architectures, model types, the
parser of config.json, and linear and latent attention on CPU. The parser reads every config.json
and leaves those without AttnRes to vLLM.
"""


def text() -> str:
    """The page."""
    others = (f"| {' | '.join(row)} |\n" for row in OTHERS)
    return f"{HEAD}{patches.markdown()}\n{MIDDLE}{''.join(others)}{TAIL}"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
