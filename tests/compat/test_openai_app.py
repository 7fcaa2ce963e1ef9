"""The address of a server, as vLLM's app knows it."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from attnres_serve.compat import openai_app


def state(port: int, *sockets: Any, **arguments: Any) -> SimpleNamespace:
    args = {"host": "127.0.0.1", "root_path": None, "ssl_keyfile": None, "uds": None} | arguments
    server = SimpleNamespace(servers=[SimpleNamespace(sockets=sockets)] if sockets else [])
    return SimpleNamespace(args=SimpleNamespace(port=port, **args), server=server)


def test_several_servers_of_a_start_list_no_socket() -> None:
    assert openai_app.url_of(state(9000)) == "http://127.0.0.1:9000"


def test_a_port_that_the_system_chose() -> None:
    with socket.create_server(("127.0.0.1", 0)) as chosen:
        port = chosen.getsockname()[1]
        assert openai_app.url_of(state(0, chosen)) == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("arguments", "url"),
    [
        ({"host": None}, "http://localhost:9000"),
        ({"host": "::"}, "http://localhost:9000"),
        ({"host": "::1", "ssl_keyfile": "key"}, "https://[::1]:9000"),
        ({"root_path": "/models/"}, "http://127.0.0.1:9000/models"),
        ({"uds": "/run/socket", "root_path": "/models"}, "http://localhost/models"),
    ],
)
def test_an_address_for_clients_on_this_machine(arguments: dict[str, Any], url: str) -> None:
    assert openai_app.url_of(state(9000, **arguments)) == url
