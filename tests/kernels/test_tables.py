"""Every Triton kernel stands in the tables that are kept by hand; docs/build/add-a-kernel.md."""

import re

import pytest
from serving import ROOT

from attnres_serve.kernels import backends

KERNELS = [
    (path.stem, name)
    for path in sorted((ROOT / "kernels" / "triton").glob("*.py"))
    for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
]
PLACES = {
    "benchmarks/kernels/compile_ahead.py": '({}, "{}"),',
    "pyproject.toml": '"attnres_serve.kernels.triton.{}"',
}


def test_the_kernels_are_found() -> None:
    assert ("single_pass", "site_kernel") in KERNELS


@pytest.mark.parametrize("place", PLACES)
def test_every_triton_kernel_is_listed(place: str) -> None:
    text = (ROOT / place).read_text()
    assert [kernel for kernel in KERNELS if PLACES[place].format(*kernel) not in text] == []


def test_an_unknown_backend_is_none() -> None:
    with pytest.raises(KeyError, match="cuda"):
        backends.load("cuda")
