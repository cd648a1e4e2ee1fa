"""Bodies in the object store of a real server."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import msgspec
import pytest

from gpukeeper.events import subjects
from gpukeeper.events.connection import Connection, connect
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.objects import JetStreamObjects, MemoryObjects, Objects, digest_of, get_body, put_body
from gpukeeper.events.streams import SiteStreams, ensure_site
from support.nats import NatsServer
from support.wait import until_answered

pytestmark = pytest.mark.processes

BODY = random.Random(7).randbytes(300_000)
STREAM = f"OBJ_{subjects.PAYLOADS_BUCKET}"


@pytest.fixture
async def bucket(connection: Connection) -> JetStreamObjects:
    await ensure_site(connection)
    return JetStreamObjects(connection, subjects.PAYLOADS_BUCKET)


@pytest.fixture(params=["memory", "server"])
def objects(request: pytest.FixtureRequest) -> Objects:
    return MemoryObjects() if request.param == "memory" else request.getfixturevalue("bucket")


async def purge_chunks(connection: Connection) -> None:
    """What the server does with chunks that have aged out, and a writer with those that it replaced."""
    await connection.js.purge_stream(STREAM, subject=f"$O.{subjects.PAYLOADS_BUCKET}.C.>")


async def last_seq(connection: Connection) -> int:
    return (await connection.js.stream_info(STREAM)).state.last_seq


@pytest.mark.parametrize("body", [BODY, b"x", b""], ids=["three chunks", "one byte", "nothing"])
async def test_a_body_comes_back_as_it_was_put(objects: Objects, body: bytes) -> None:
    ref = await objects.put("a", body)

    assert (ref.object, ref.size, ref.digest) == ("a", len(body), digest_of(body))
    assert await objects.get("a") == body
    assert await objects.get("a", size_max=len(body)) == body
    assert await objects.names() == ["a"]


async def test_what_is_not_there_and_what_was_deleted_is_none(objects: Objects) -> None:
    assert await objects.get("a") is None
    assert await objects.fresh("a") is None
    await objects.put("a", BODY)
    await objects.delete("a")
    await objects.delete("a")

    assert await objects.get("a") is None
    assert await objects.fresh("a") is None
    assert await objects.names() == []


async def test_more_than_was_asked_for_is_not_read(objects: Objects) -> None:
    ref = await objects.put("a", BODY)

    assert await objects.get("a", size_max=len(BODY) - 1) is None
    assert await get_body(objects, msgspec.structs.replace(ref, size=1)) is None
    assert await get_body(objects, ref) == BODY


async def test_another_body_under_the_name_is_none(objects: Objects) -> None:
    ref = await objects.put("a", BODY)
    await objects.put("a", BODY[::-1])

    assert await get_body(objects, ref) is None


async def test_an_object_whose_chunks_are_gone_is_none(connection: Connection, bucket: JetStreamObjects) -> None:
    await bucket.put("a", BODY)
    await purge_chunks(connection)

    assert await asyncio.wait_for(bucket.get("a"), 10) is None


async def test_a_body_that_is_there_is_not_put_again(connection: Connection, bucket: JetStreamObjects) -> None:
    """Replacing it would take its chunks away from under whoever reads it."""
    ref = await put_body(bucket, BODY)
    before = await last_seq(connection)

    assert await put_body(bucket, BODY) == ref

    assert await last_seq(connection) == before


async def test_a_body_that_is_there_in_part_is_put_again(connection: Connection, bucket: JetStreamObjects) -> None:
    ref = await put_body(bucket, BODY)
    await purge_chunks(connection)

    assert await put_body(bucket, BODY) == ref

    assert await get_body(bucket, ref) == BODY


async def test_a_body_that_would_soon_be_gone_is_put_again(connection: Connection) -> None:
    await ensure_site(connection, SiteStreams(payload_ttl_s=2))
    bucket = JetStreamObjects(connection, subjects.PAYLOADS_BUCKET)
    ref = await put_body(bucket, BODY)
    assert await bucket.fresh(ref.object) == ref

    async def old() -> bool:
        return await bucket.fresh(ref.object) is None

    await until_answered(old, "half of its time is over")
    before = await last_seq(connection)
    await put_body(bucket, BODY)

    assert await last_seq(connection) > before


async def test_a_server_that_stands_still_is_a_bucket_that_is_not_available(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    try:
        server.start()
        connection = await connect(server.settings(), name="tests")
        await ensure_site(connection)
        bucket = JetStreamObjects(connection, subjects.PAYLOADS_BUCKET, limit_s=0.5)
        await bucket.put("a", BODY)
        server.freeze()

        for call in (bucket.put("b", BODY), bucket.get("a"), bucket.fresh("a"), bucket.names(), bucket.delete("a")):
            with pytest.raises(LogUnavailable, match=subjects.PAYLOADS_BUCKET):
                await asyncio.wait_for(call, 4)
        server.resume()
        await connection.close()
    finally:
        server.stop()
