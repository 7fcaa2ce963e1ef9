"""vLLM's benchmark client."""

from typing import Any, NoReturn

from attnres_serve.errors import SettingError


def ask_over_http(arguments: list[str]) -> dict[str, Any]:
    """Run vLLM's benchmark client and return its results.

    Args:
        arguments: flags of ``vllm bench serve``.

    Raises:
        SettingError: the client does not know a flag.
    """
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise SettingError(
                f"{message}; with --http, flags that are not ours are vLLM's benchmark client's."
            )

    parser = Parser()
    serve.add_cli_args(parser)
    return serve.main(parser.parse_args(arguments))
