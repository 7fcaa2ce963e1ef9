"""``python -m attnres_serve.warmup``: once after installation, what a first start would do.

It compiles the C++ backend where there is no GPU and lets vLLM inspect the model classes named on
the command line.  Both are kept in caches; leaving it out only makes the first start slower.
"""

import sys

from attnres_serve import compat, plugin
from attnres_serve.kernels import backends


def main(architectures: list[str]) -> int:
    """Warm the caches.

    Args:
        architectures: ours, such as ``AttnResLlamaForCausalLM``.

    Returns:
        The exit status.
    """
    status = 0
    if compat.on_cpu():
        try:
            backends.load("cpp")
        except backends.BackendError as error:
            print(f"{error} AttnRes runs on the slower torch backend.", file=sys.stderr)
            status = 1
    plugin.register()
    for architecture in architectures:
        compat.inspect_model_class(architecture)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
