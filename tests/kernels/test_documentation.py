"""docs/build/kernels.md: its examples run, its functions exist with those parameters, and importing
the package costs nothing."""

import importlib
import inspect
import re

import pytest
import torch
from commands import python
from serving import ROOT

BUILD = ROOT / "docs" / "build"
TEXT = (BUILD / "kernels.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SIGNATURES = re.findall(r"^\| `(\w+)\(([^`]*)\)` \|", TEXT, re.MULTILINE)
MODULES = (
    "torch.functions",
    "triton.single_pass",
    "triton.phase_1",
    "triton.phase_2",
)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_runs(number):
    torch.manual_seed(number)
    exec(compile(EXAMPLES[number], f"example {number} of docs/build/kernels.md", "exec"), {})


def test_every_module_of_the_table_has_an_example():
    assert len(EXAMPLES) == 5
    imported = [f"from attnres_serve.kernels.{module} import" for module in MODULES[1:]]
    imported += [
        "from attnres_serve.kernels.torch import functions",
        "recurrence import",
        "reference",
    ]
    for words in imported:
        assert any(words in example for example in EXAMPLES)


def test_the_signatures_are_those_of_the_code():
    """By name, order, kind and default."""
    assert len(SIGNATURES) == 7
    for name, parameters in SIGNATURES:
        found = []
        for module in MODULES:
            function = getattr(
                importlib.import_module(f"attnres_serve.kernels.{module}"), name, None
            )
            if function is not None and function.__module__.endswith(module):
                signature = inspect.signature(function)
                kept = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
                found.append(str(inspect.Signature(kept)).strip("()"))
        assert parameters in found, f"{name}: {parameters} is none of {found}"


def test_the_kernels_of_the_profiling_recipe_exist():
    recipe = (BUILD / "profile-kernels.md").read_text()
    pattern = re.search(r"--kernel-name 'regex:(\S+)'", recipe)[1]
    kernels = {
        name
        for module in MODULES[1:]
        for name in vars(importlib.import_module(f"attnres_serve.kernels.{module}"))
        if name.endswith("_kernel")
    }
    assert kernels and all(re.fullmatch(pattern, name) for name in kernels)


def test_importing_the_package_imports_neither_triton_nor_torch_nor_vllm():
    code = "import sys, attnres_serve.kernels; print({*sys.modules} & {%r, %r, %r, %r})"
    assert python(code % ("triton", "torch", "vllm", "numpy")) == "set()\n"
