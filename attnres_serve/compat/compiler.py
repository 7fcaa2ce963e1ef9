"""A check for the C++ compiler that torch.compile needs on CPU, before vLLM is imported."""

import os
import shutil

from attnres_serve.compat import device
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError


def require(arguments: Arguments) -> None:
    """Refuse a compiled start on CPU without a compiler, even if all code is cached.

    Args:
        arguments: of vLLM; with ``-O`` or ``--compilation-config`` the check is left to vLLM.

    Raises:
        SettingError: there is no compiler for torch.compile.
    """
    if not device.is_cpu() or arguments.enforce_eager:
        return
    if arguments.has("optimization_level", "compilation_config"):
        return
    compiler = os.environ.get("CXX", "g++")  # the choice of torch's inductor
    may_install = bool(os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"))
    if may_install or shutil.which(compiler):
        return
    whence = ", which CXX names" if "CXX" in os.environ else ""
    raise SettingError(
        f"found no {compiler!r} on the path{whence}; a compiled start on CPU needs a C++ compiler: "
        "install the package g++ (gcc-c++ on Fedora), or give --enforce-eager, which needs none."
    )
