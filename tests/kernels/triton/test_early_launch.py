"""Programmatic dependent launch: which launches ask for it, and what they pass.

That a kernel waits before it touches memory is read off its machine code in
``test_ahead_of_time.py``.
"""

import pytest
import torch
from triton.backends.nvidia.compiler import CUDAOptions

from attnres_serve.kernels.triton import common


@pytest.mark.parametrize(
    ("device", "capability", "early", "changes"),
    [
        ("cuda:0", (8, 0), False, {}),
        ("cuda:0", (8, 9), False, {}),
        ("cuda:0", (9, 0), True, {}),
        ("cuda:1", (10, 0), True, {}),
        ("cuda:0", (12, 0), True, {}),
        ("cpu", None, False, {}),
        # Tensors that an ahead-of-time compilation specialises from.
        ("meta", None, False, {}),
        # The interpreter refuses the option, and ROCm's devices have other numbers.
        ("cuda:0", None, False, {"interpreted": True}),
        ("cuda:0", None, False, {"cuda": None}),
    ],
)
def test_devices_from_hopper_on_start_early(
    device: str,
    capability: tuple[int, int] | None,
    early: bool,
    changes: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device is asked only if it is one of CUDA's."""
    asked = []
    monkeypatch.setattr(common, "INTERPRETED", changes.get("interpreted", False))
    monkeypatch.setattr(torch.version, "cuda", changes.get("cuda", "13.0"))
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda which: asked.append(which) or capability
    )
    monkeypatch.setattr(common, "capability", common.capability.__wrapped__)
    assert common.starts_early(torch.device(device)) is early
    assert asked == ([torch.device(device)] if capability else [])


def test_this_triton_has_the_option() -> None:
    """An unknown option would be refused at the first launch."""
    assert "launch_pdl" in CUDAOptions.__dataclass_fields__
