"""``python -m attnres_serve.warmup``: once after installation, what a first start would do.

It compiles the C++ backend where there is no GPU and lets vLLM inspect the model classes named on
the command line.  Both are kept in caches; leaving it out only makes the first start slower.
"""

import sys

from attnres_serve import plugin
from attnres_serve.compat import host, registry
from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import BackendError


def main(architectures: list[str]) -> int:
    """Warm the caches.

    Args:
        architectures: ours, such as ``AttnResLlamaForCausalLM``.

    Returns:
        The exit status.
    """
    status = 0
    if host.on_cpu():
        try:
            backends.load("cpp")
        except BackendError as error:
            print(f"{error} AttnRes runs on the slower torch backend.", file=sys.stderr)
            status = 1
    plugin.register()
    for architecture in architectures:
        registry.inspect_model_class(architecture)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
