"""The C++ compiler that torch.compile needs on CPU, looked for before vLLM is imported."""

import os
import shutil

from attnres_serve.compat import device
from attnres_serve.compat.arguments import Arguments
from attnres_serve.errors import SettingError


def require(arguments: Arguments) -> None:
    """Refuse a compiled start on CPU without a compiler; a start with all code in the cache, too.

    Args:
        arguments: of vLLM; what is compiled by ``-O`` or ``--compilation-config`` is left to it.

    Raises:
        SettingError: torch.compile would find no compiler.
    """
    if not device.is_cpu() or arguments.enforce_eager:
        return
    if arguments.has("optimization_level", "compilation_config"):
        return
    compiler = os.environ.get("CXX", "g++")  # as torch's inductor chooses
    may_install = bool(os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"))
    if may_install or shutil.which(compiler):
        return
    whence = ", which CXX names" if "CXX" in os.environ else ""
    raise SettingError(
        f"found no {compiler!r} on the path{whence}; a compiled start on CPU needs a C++ compiler: "
        "install the package g++ (gcc-c++ on Fedora), or give --enforce-eager, which needs none."
    )
