"""Hugging Face's classes recompiled for float64.

Their norms, routers, softmaxes and rotary tables use float32 by name. The source of a class' module
is compiled again with float64 instead and runs as a separate module, so that the imported one is
not changed. Optional packages of Triton kernels, which have no float64, are removed in the same
way.
"""

import ast
import importlib
import re
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

# Modules that cast; they are recompiled together with the modules that import them.
_CASTS = re.compile(r"transformers\.(modeling_rope_utils|models\.\w+\.modeling_\w+)")
_FLOAT32 = ("float32", "float")  # names in torch
# Calls that would enable kernels of fla, causal_conv1d, mamba_ssm or kernels, and their results.
_KERNELS = {
    "is_flash_linear_attention_available": False,
    "is_causal_conv1d_available": False,
    "is_mamba_ssm_available": False,
    "is_mamba_2_ssm_available": False,
    "lazy_load_kernel": None,
}
_KERNEL_DECORATOR = "use_kernel_func_from_hub"  # the prefix of the decorators' names


def wide_class(cls: type) -> Any:
    """The class of the same name in the recompiled module of ``cls``."""
    return getattr(wide_module(cls.__module__), cls.__name__)


@cache
def wide_module(name: str) -> ModuleType:
    """A module of transformers recompiled for float64; it is not in ``sys.modules``."""
    original = importlib.import_module(name)
    file = str(original.__file__)
    wide = ModuleType(name)
    wide.__dict__.update(__file__=file, __package__=original.__package__)
    widen = _Widen(str(original.__package__))
    tree = widen.visit(ast.parse(Path(file).read_text(encoding="utf-8")))
    wide.__dict__.update(widen.imported)
    exec(compile(ast.fix_missing_locations(tree), file, "exec"), wide.__dict__)
    return wide


class _Widen(ast.NodeTransformer):
    """Replaces float32 by float64, and removes optional kernels.

    Attributes:
        package: the package of the module.
        imported: the module's imports from recompiled modules, by name.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.imported: dict[str, Any] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        module = resolve_name("." * node.level + (node.module or ""), self.package)
        if not _CASTS.fullmatch(module):
            return node
        for name in node.names:
            self.imported[name.asname or name.name] = getattr(wide_module(module), name.name)
        return None

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in _FLOAT32:
            node.attr = "float64"
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = node.func
        if isinstance(called, ast.Name) and called.id in _KERNELS:
            return ast.copy_location(ast.Constant(_KERNELS[called.id]), node)
        if isinstance(called, ast.Attribute) and called.attr == "float" and not node.args:
            called.attr = "double"
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [one for one in node.decorator_list if not _brings_kernel(one)]
        return self.generic_visit(node)


def _brings_kernel(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id.startswith(_KERNEL_DECORATOR)
