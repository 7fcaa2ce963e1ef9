"""vLLM's benchmark client."""

from typing import Any, NoReturn

from attnres_serve.errors import SettingError


def ask_over_http(arguments: list[str]) -> dict[str, Any]:
    """Run vLLM's benchmark client and return its results.

    Args:
        arguments: flags of ``vllm bench serve``.

    Raises:
        SettingError: the client gave up, or does not know a flag.
    """
    import sys
    from contextlib import redirect_stdout

    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise SettingError(
                f"{message}; with --http, flags that are not ours are vLLM's benchmark client's."
            )

    parser = Parser()
    serve.add_cli_args(parser)
    with redirect_stdout(sys.stderr):  # stdout is the document's
        asked = parser.parse_args(arguments)
        try:
            return serve.main(asked)
        except Exception as error:  # whatever a server may do wrong
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise SettingError(f"the server could not be measured: {reason[0]}") from None
