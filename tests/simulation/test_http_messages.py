"""The simulated server's HTTP reader: the same requests however the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollwright.simulation.http_messages import MAX_BODY, MAX_HEAD, Request, RequestReader, RequestRefused


def post(body: bytes, *headers: bytes, path: bytes = b"/v1/x", version: bytes = b"1.1") -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"Host: x", b"content-length:%d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def read(data: bytes, cuts: list[int] | None = None) -> list[Request]:
    reader = RequestReader()
    found = []
    edges = [0, *sorted(cuts or []), len(data)]
    for start, stop in pairwise(edges):
        reader.feed(data[start:stop])
        while (request := reader.next()) is not None:
            found.append(request)
    assert reader.buffered == 0
    return found


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=5), st.data())
def test_pipelined_requests_come_out_whole_and_in_order_however_they_are_cut(
    bodies: list[bytes], data: st.DataObject
) -> None:
    stream = b"".join(post(body) for body in bodies)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    assert [request.body for request in read(stream, cuts)] == bodies


def test_single_bytes_are_enough() -> None:
    stream = post(b"hello") + b"GET /health HTTP/1.1\r\n\r\n"
    assert read(stream, list(range(len(stream)))) == [
        Request("POST", "/v1/x", b"hello", True),
        Request("GET", "/health", b"", True),
    ]


def test_a_query_is_not_part_of_the_path() -> None:
    assert read(post(b"", path=b"/v1/models?limit=3"))[0].path == "/v1/models"


@pytest.mark.parametrize(
    ("version", "headers", "keep_alive"),
    [
        (b"1.1", (), True),
        (b"1.1", (b"Connection: close",), False),
        (b"1.1", (b"CONNECTION:  Close ",), False),
        (b"1.0", (), False),
        (b"1.0", (b"Connection: keep-alive",), True),
    ],
)
def test_the_connection_is_kept_as_the_client_says(
    version: bytes, headers: tuple[bytes, ...], keep_alive: bool
) -> None:
    assert read(post(b"", *headers, version=version))[0].keep_alive is keep_alive


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST /x HTTP/2.0\r\n\r\n", 400),
        (b"POST http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (post(b"", b"no colon"), 400),
        (post(b"", b"Na me: x"), 400),
        (post(b"", b" folded: x"), 400),
        (post(b"", b"X: a\nInjected: b"), 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: +1\r\n\r\n", 400),
        (post(b"12345", b"Content-Length: 4"), 400),
        (b"POST /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (post(b"", b"Expect: 100-continue"), 417),
        (b"POST /x HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY + 1), 413),
        (b"POST /x HTTP/1.1\r\nX: " + b"y" * MAX_HEAD, 431),
        (b"\x16\x03\x01" + b"\x00" * MAX_HEAD, 431),
    ],
)
def test_everything_else_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(RequestRefused) as refusal:
        read(data)
    assert refusal.value.status == status


@given(st.binary(max_size=200))
def test_noise_is_refused_or_read_but_never_breaks_the_reader(noise: bytes) -> None:
    reader = RequestReader()
    data = noise + b"\r\n\r\n"
    reader.feed(data)
    bodies, status = [], None
    try:
        while (request := reader.next()) is not None:
            bodies.append(request.body)
    except RequestRefused as refusal:
        status = refusal.status
    assert status is None or 400 <= status < 600
    assert all(body in data for body in bodies)
    assert reader.buffered <= len(data)
