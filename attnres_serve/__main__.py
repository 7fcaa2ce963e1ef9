"""The entry of the ``attnres-serve`` command and of ``python -m attnres_serve``.

Imports next to nothing, because a signal has to find a process that can hear it.
"""

import gc
import os
import signal
import sys


def main() -> int:
    """Run the command; ``serve`` under its supervisor, except where it only prints help."""
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
    # Kept for the supervisor, also while this process begins again.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    from attnres_serve.server.start import preload

    preload.begin_again_with_libraries()
    from attnres_serve.server.start import supervisor  # not before: all that is imported goes then

    return supervisor.supervise(arguments, _serve)


def _serve() -> int:
    from attnres_serve import cli
    from attnres_serve.start import failures, quick_exit

    gc.disable()  # imports make what lasts, and collections take a fifth of their time
    with quick_exit.instead_of_unwinding():
        with failures.told():
            status = cli.main()
        quick_exit.end_now(status)


if __name__ == "__main__":
    sys.path.append(sys.path.pop(0))  # the working folder, whose files shadow no module
    sys.exit(main())
