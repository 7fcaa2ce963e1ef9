"""The bounds of vLLM's flags for headers, with either HTTP parser.

uvicorn prefers httptools, which accepts any number of headers of any size, and copies a partial
header again with every piece that arrives: before a key is checked, and on the event loop that
serves all requests.
"""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from attnres_serve.compat import openai_app


class BoundedHeaders(HttpToolsProtocol):
    """uvicorn's protocol; too many or too large headers end the connection.

    Request targets, trailers and the framing of body chunks count like headers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most_bytes, self.most_headers = openai_app.header_bounds(self.config)
        self.unread = 0  # bytes since the last piece of a body or the last complete headers

    def data_received(self, data: bytes) -> None:
        self.unread += len(data)
        super().data_received(data)
        if self.unread > self.most_bytes and not self.transport.is_closing():
            self.send_400_response("The headers of this request are too large.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= self.most_headers:
            raise ValueError("too many headers")  # the parser stops, and uvicorn answers 400
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
