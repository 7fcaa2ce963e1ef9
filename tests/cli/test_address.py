"""The address of a server that is asked over HTTP, and the way there."""

import os

import pytest

from attnres_serve import address


@pytest.mark.parametrize(
    "base", ["http://x:8000", "https://x", "http://[::1]:80", "http://x/below"]
)
@pytest.mark.parametrize(
    "below",
    [
        *("", "/", "//", "/v1", "/v1/", "/attn_res", "/attn_res/", "/attn_res#run=1"),
        *("/attn_res?prompt=a/v1", "/v1/attn_res", "/v1/attn_res/trace"),
    ],
)
def test_an_address_that_serve_prints_is_that_of_the_server(base, below):
    assert address.base_of(base + below) == base


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        *(("http://127.0.0.1:8000", True), ("http://127.9.9.9", True), ("https://[::1]:1/", True)),
        *(
            ("http://localhost:1/v1", True),
            ("http://a.localhost", True),
            ("http://10.0.0.1", False),
        ),
        *(("http://localhost.example.org", False), ("x", False), ("http://[", False)),
    ],
)
def test_this_machine(url, expected):
    assert address.is_local(url) == expected


@pytest.fixture
def proxies(monkeypatch):
    for name in ("http", "https", "all", "no"):
        for variable in (f"{name}_proxy", f"{name.upper()}_PROXY"):
            monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize("given", [None, "", "example.org", "127.0.0.1"])
@pytest.mark.parametrize("upper", [None, "example.com"])
def test_no_proxy_for_this_machine_and_for_as_long_as_it_is_asked(given, upper, proxies):
    for name, value in (("no_proxy", given), ("NO_PROXY", upper)):
        if value is not None:
            proxies.setenv(name, value)
    before = dict(os.environ)
    with address.past_proxies("http://example.net"):
        assert dict(os.environ) == before
    with address.past_proxies("http://127.0.0.1:8000"):
        hosts = os.environ["no_proxy"].split(",")
        assert "127.0.0.1" in hosts and "" not in hosts
        kept = upper if given is None else given
        assert not kept or kept in hosts
    assert dict(os.environ) == before


def test_the_proxy_of_an_address(proxies):
    assert address.proxy_of("http://10.0.0.1") is None
    proxies.setenv("http_proxy", "http://user:secret@10.0.0.9:3128")
    assert address.proxy_of("http://10.0.0.1/v1") == "http_proxy"
    assert address.proxy_of("https://10.0.0.1") is None
    assert address.proxy_of("http://localhost:8000") is None and address.proxy_of("x") is None
    proxies.setenv("ALL_PROXY", "http://10.0.0.9:3128")
    assert address.proxy_of("https://10.0.0.1") == "all_proxy"
    proxies.setenv("no_proxy", "10.0.0.1")
    assert address.proxy_of("http://10.0.0.1") is None
