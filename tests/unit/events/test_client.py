from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import ProtocolError

from gpukeeper.events.client import TotalParser, headers_of


class Told:
    """A client that notes what its parser hands on."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    async def _process_msg(self, *message: Any) -> None:
        self.told.append(message)

    async def _process_ping(self) -> None:
        self.told.append(("ping",))

    async def _process_pong(self) -> None:
        self.told.append(("pong",))

    async def _process_err(self, text: str) -> None:
        self.told.append(("err", text))

    async def _process_info(self, info: object) -> None:
        self.told.append(("info", info))


TALK = (
    b'INFO {"server_id":"x"} \r\n+OK\r\nPING\r\n'
    b"MSG a.b 1 5\r\nhe\r\no\r\n"
    b"MSG a.b 2 reply.to 0\r\n\r\n"
    b"MSG a\x0bb 3\t\xff\x0c.c  4\r\nbody\r\n"
    b"HMSG a 4 reply 12 14\r\nNATS/1.0\r\n\r\nhi\r\n"
    b"HMSG a 5 1 3\r\nXhi\r\n"
    b"-ERR 'Permissions Violation for Publish to \"a\"'\r\nPONG\r\n"
)
HEARD = [
    ("info", {"server_id": "x"}),
    ("ping",),
    (1, b"a.b", b"", b"he\r\no", b""),
    (2, b"a.b", b"reply.to", b"", b""),
    (3, b"a\x0bb", b"\xff\x0c.c", b"body", b""),
    (4, b"a", b"reply", b"hi", b"NATS/1.0\r\n\r\n"),
    (5, b"a", b"", b"hi", b"X"),
    ("err", "'permissions violation for publish to \"a\"'"),
    ("pong",),
]


async def heard(*parts: bytes) -> list[tuple[Any, ...]]:
    told = Told()
    parser = TotalParser(told)
    for part in parts:
        await parser.parse(part)
    assert not parser.buf
    return told.told


async def test_what_the_server_says_is_handed_on_message_by_message() -> None:
    assert await heard(TALK) == HEARD


async def test_it_does_not_matter_where_the_stream_of_bytes_is_cut() -> None:
    assert await heard(*(bytes([byte]) for byte in TALK)) == HEARD
    for place in range(len(TALK)):
        assert await heard(TALK[:place], TALK[place:]) == HEARD


@pytest.mark.parametrize(
    "line",
    [
        b"HELLO\r\n",
        b"\r\n",
        b"MSG a 1\r\n",
        b"MSG a b c d 1\r\n",
        b"MSG a one 1\r\n",
        b"HMSG a 1 9 3\r\n",
        b"HMSG a 1 -1 3\r\n",
        b"x" * 1_100_000,
    ],
    ids=lambda line: line[:20].decode().strip() or "nothing",
)
async def test_what_is_no_line_of_the_protocol_is_an_error(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        await TotalParser(Told()).parse(line)


@pytest.mark.parametrize(
    "block",
    [
        b"NATS/1.0\r\n\r\n",
        b"NATS/1.0\r\nNats-Msg-Id: 01M8K\r\nA:b\r\nC: d: e \r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 404 No Messages\r\n\r\n",
        b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 10\r\nNats-Last-Stream: 12\r\n\r\n",
        b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: 1\r\n\r\n",
        "NATS/1.0\r\nA: Grüße\r\n\r\n".encode(),
    ],
)
async def test_a_lawful_block_is_read_as_the_library_reads_it(block: bytes) -> None:
    assert headers_of(block) == await Client()._process_headers(block)  # pyright: ignore[reportPrivateUsage]


@given(st.binary(max_size=80), st.sampled_from([b"", b"NATS/1.0", b"NATS/1.0 ", b"NATS/1.0\r\n", b"NATS/1.0 100 "]))
def test_any_bytes_at_all_are_headers_or_none(rest: bytes, first: bytes) -> None:
    found = headers_of(first + rest)

    assert found is None or all(value.encode() is not None for item in found.items() for value in item)
