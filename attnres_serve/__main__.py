"""The entry of the ``attnres-serve`` command and of ``python -m attnres_serve``.

It imports almost nothing, so that the process can handle signals early.
"""

import gc
import os
import signal
import sys


def main() -> int:
    """Run the command; ``serve`` runs under its supervisor unless it only prints help."""
    os.environ["PYTHONSAFEPATH"] = "1"  # no file of the working folder shadows a child's module
    arguments = sys.argv[1:]
    helps = any(word.split("=")[0] in ("-h", "--help") for word in arguments)
    if arguments[:1] != ["serve"] or helps:
        from attnres_serve import cli, output
        from attnres_serve.server.start import streams

        streams.mend()
        status = cli.main()
        output.end()
        return status
    # Blocked for the supervisor, also while this process restarts.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    from attnres_serve.server.start import preload

    preload.begin_again_with_libraries()
    from attnres_serve.server.start import supervisor  # not earlier: the restart drops all imports

    return supervisor.supervise(arguments, _serve)


def _serve() -> int:
    from attnres_serve import cli
    from attnres_serve.start import failures, quick_exit

    gc.disable()  # collections take a fifth of the time of imports, whose objects stay
    with quick_exit.instead_of_unwinding():
        with failures.reported():
            status = cli.main()
        quick_exit.end_now(status)


if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # the working folder last, so that it shadows no module
    sys.exit(main())
