"""Headers within the bounds of vLLM's flags, whichever parser reads them.

uvicorn prefers httptools, which takes any number of headers of any size, and copies what it has of
one again with every piece that arrives: all of it before a key is asked for, and on the event loop
that answers everyone.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from attnres_serve.compat import openai_app


class BoundedHeaders(HttpToolsProtocol):
    """uvicorn's protocol; a request whose headers are too many or too large ends its connection.

    Addresses, trailers and what stands between the pieces of a body count as headers do.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most_bytes, self.most_headers = openai_app.header_bounds(self.config)
        self.unread = 0  # bytes since the last piece of a body or the last whole headers

    def data_received(self, data: bytes) -> None:
        self.unread += len(data)
        super().data_received(data)
        if self.unread > self.most_bytes and not self.transport.is_closing():
            self.send_400_response("The headers of this request are too large.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self.most_headers:
            raise ValueError("too many headers")  # the parser ends, and uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self.unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.unread = 0
        super().on_message_complete()
