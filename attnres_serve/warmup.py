"""``python -m attnres_serve.warmup``: once after installation, what a first start would do.

It compiles the C++ backend where there is no GPU, which is kept in a cache; leaving it out only
makes the first start slower.
"""

import sys

from attnres_serve.compat import host
from attnres_serve.kernels import backends
from attnres_serve.kernels.interface import BackendError


def main() -> int:
    """Warm the cache; returns the exit status."""
    if host.on_cpu():
        try:
            backends.load("cpp")
        except BackendError as error:
            print(f"{error} AttnRes runs on the slower torch backend.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
