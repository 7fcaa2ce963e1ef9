"""Programmatic dependent launch: which launches ask for it, and what they pass.

That a kernel waits before it touches memory is read off its machine code in
``test_triton_ahead_of_time``.
"""

import pytest
import torch
from triton.backends.nvidia.compiler import CUDAOptions

from attnres_serve.kernels.triton import common


@pytest.mark.parametrize(
    ("device", "capability", "early"),
    [
        ("cuda:0", (8, 0), False),
        ("cuda:0", (8, 9), False),
        ("cuda:0", (9, 0), True),
        ("cuda:1", (10, 0), True),
        ("cuda:0", (12, 0), True),
        ("cpu", None, False),
        # Tensors that an ahead-of-time compilation specialises from.
        ("meta", None, False),
    ],
)
def test_devices_from_hopper_on_start_early(
    device: str, capability: tuple[int, int] | None, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device is asked only if it is one of CUDA's."""
    asked = []
    monkeypatch.setattr(common, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda which: asked.append(which) or capability
    )
    monkeypatch.setattr(common, "capability", common.capability.__wrapped__)
    assert common.starts_early(torch.device(device)) is early
    assert asked == ([torch.device(device)] if capability else [])


@pytest.mark.parametrize(("name", "value"), [("INTERPRETED", True), ("cuda", None)])
def test_neither_the_interpreter_nor_another_vendor_starts_early(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter refuses the option, and ROCm's devices have other numbers."""
    monkeypatch.setattr(common, "INTERPRETED", False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda which: (9, 4))
    owner = common if name == "INTERPRETED" else torch.version
    monkeypatch.setattr(owner, name, value)
    monkeypatch.setattr(common, "capability", common.capability.__wrapped__)
    assert not common.starts_early(torch.device("cuda:0"))


def test_this_triton_has_the_option() -> None:
    """An unknown option would be refused at the first launch."""
    assert "launch_pdl" in CUDAOptions.__dataclass_fields__
