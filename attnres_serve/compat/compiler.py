"""The C++ compiler that torch.compile needs on CPU, looked for before vLLM is imported."""

import os
import shutil

from attnres_serve.compat import device
from attnres_serve.errors import SettingError
from attnres_serve.flags import usual

# Flags that say otherwise what is compiled, which is left to vLLM.
OTHERS = ("-O", "-cc", "--optimization-level", "--compilation-config")


def require(words: list[str]) -> None:
    """Refuse a compiled start on CPU without a compiler; a start with all code in the cache, too.

    Args:
        words: flags of vLLM's, with those of a file.

    Raises:
        SettingError: torch.compile would find no compiler.
    """
    words = [usual(word) for word in words]
    eager = [word for word in words if word in ("--enforce-eager", "--no-enforce-eager")]
    if not device.is_cpu() or eager[-1:] == ["--enforce-eager"]:
        return
    compiler = os.environ.get("CXX", "g++")  # as torch's inductor chooses
    may_install = bool(os.environ.get("TORCH_INDUCTOR_INSTALL_GXX"))
    if may_install or shutil.which(compiler) or any(word.startswith(OTHERS) for word in words):
        return
    whence = ", which CXX names" if "CXX" in os.environ else ""
    raise SettingError(
        f"found no {compiler!r} on the path{whence}; a compiled start on CPU needs a C++ compiler: "
        "install the package g++ (gcc-c++ on Fedora), or give --enforce-eager, which needs none."
    )
