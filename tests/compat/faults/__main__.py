"""Which faults does the installed vLLM have?  ``python -m tests.compat.faults [NAME ...]``

Prints a table of the workarounds, or of those that are named.  Ends with the status 1 where a
workaround's range of versions is wrong.
"""

import logging
import os
import sys
import traceback

from tests.compat import faults


def main() -> int:
    logging.disable(logging.WARNING)
    import vllm.entrypoints.openai.api_server  # once for all forks

    print(f"| workaround | targets in vLLM {vllm.__version__} | fault |\n|---|---|---|")
    return int(any([in_a_fork(name) for name in sys.argv[1:] or faults.names()]))


def in_a_fork(name: str) -> int:
    """Print a row; 0 if its range is right.  What a fork applies stays there."""
    sys.stdout.flush()
    if child := os.fork():
        return os.waitpid(child, 0)[1]
    status = 1
    try:
        absent = faults.missing(name)
        said, is_right = fault(name)
        print(f"| {name} | {'without ' + ', '.join(absent) if absent else 'found'} | {said} |")
        status = int(bool(absent) or not is_right)
    except BaseException:
        print(f"| {name} | | {traceback.format_exc()} |")
    sys.stdout.flush()
    os._exit(status)


def fault(name: str) -> tuple[str, bool]:
    """What is printed of a fault, and whether the workaround's range of versions is right."""
    if (why := faults.reason(name)) is not None:
        return f"cannot be shown: {why}", True
    if not faults.is_tried(name):
        return "not tried: the range begins later", True
    tried = faults.try_out(name)
    problem = tried.problem(name)
    return problem or ("there" if tried.due else "not there"), problem is None


if __name__ == "__main__":
    sys.exit(main())
