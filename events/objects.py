"""Bodies too large for the log, and snapshots: named bytes with a digest."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

import nats.errors
import nats.js.errors
from nats.js.api import ObjectInfo
from nats.js.object_store import ObjectStore

from gpukeeper.events.clock import now_ns
from gpukeeper.events.connection import Connection
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.jetstream import JetStreamLog
from gpukeeper.events.work import ObjectRef


class Objects(Protocol):
    """A bucket of named bytes."""

    async def put(self, name: str, body: bytes) -> ObjectRef:
        """Store ``body`` under ``name``, replacing what was there."""
        ...

    async def get(self, name: str, *, size_max: int | None = None) -> bytes | None:
        """The bytes, or None where there are none (any more), or more than ``size_max``."""
        ...

    async def fresh(self, name: str) -> ObjectRef | None:
        """What is under ``name``, where it stays for at least half of the time that objects are kept."""
        ...

    async def names(self) -> list[str]:
        """Every name, oldest first."""
        ...

    async def delete(self, name: str) -> None:
        """Remove it; nothing happens when it is not there."""
        ...


def digest_of(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


async def put_body(objects: Objects, body: bytes) -> ObjectRef:
    """Store a body under its own digest, so that the same body is stored once and a repeated submission is the same.

    One that is there is not replaced, which would take it away from under whoever reads it; unless it is old, and would
    be gone long before what refers to it now.
    """
    digest = digest_of(body)
    wanted = ObjectRef(object=digest, size=len(body), digest=digest)
    return wanted if await objects.fresh(digest) == wanted else await objects.put(digest, body)


async def get_body(objects: Objects, ref: ObjectRef) -> bytes | None:
    """The bytes of ``ref``, or None where they are gone or are not what its size and digest say."""
    body = await objects.get(ref.object, size_max=ref.size)
    return body if body is not None and digest_of(body) == ref.digest else None


class MemoryObjects:
    """Objects in a dict."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    async def put(self, name: str, body: bytes) -> ObjectRef:
        self._bodies.pop(name, None)
        self._bodies[name] = bytes(body)
        return ObjectRef(object=name, size=len(body), digest=digest_of(body))

    async def get(self, name: str, *, size_max: int | None = None) -> bytes | None:
        body = self._bodies.get(name)
        return None if body is None or (size_max is not None and len(body) > size_max) else body

    async def fresh(self, name: str) -> ObjectRef | None:
        body = self._bodies.get(name)
        return None if body is None else ObjectRef(object=name, size=len(body), digest=digest_of(body))

    async def names(self) -> list[str]:
        return list(self._bodies)

    async def delete(self, name: str) -> None:
        self._bodies.pop(name, None)


class JetStreamObjects:
    """Objects in a JetStream object store. No call takes longer than ``limit_s``."""

    def __init__(self, connection: Connection, bucket: str, *, limit_s: float = 60.0) -> None:
        self._connection = connection
        self._bucket = bucket
        self._limit_s = limit_s
        self._store: ObjectStore | None = None
        self._messages = JetStreamLog(connection, stream=f"OBJ_{bucket}")

    async def _open(self) -> ObjectStore:
        if self._store is None:
            self._store = await self._connection.js.object_store(self._bucket)
        return self._store

    @asynccontextmanager
    async def _bounded(self) -> AsyncGenerator[None]:
        """What the client raises, and too long a time, is a bucket that does not answer."""
        try:
            async with asyncio.timeout(self._limit_s):
                yield
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise LogUnavailable(f"bucket {self._bucket}: {error or type(error).__name__}") from error

    async def put(self, name: str, body: bytes) -> ObjectRef:
        async with self._bounded():
            await (await self._open()).put(name, body)
        return ObjectRef(object=name, size=len(body), digest=digest_of(body))

    async def get(self, name: str, *, size_max: int | None = None) -> bytes | None:
        async with self._bounded():
            info = await self._info(name)
            if info is None or not info.nuid:
                return None
            size = info.size or 0
            return None if size_max is not None and size > size_max else await self._chunks(info.nuid, size)

    async def _chunks(self, nuid: str, size: int) -> bytes | None:
        """Exactly ``size`` bytes, chunk by chunk; None where one is missing.

        The client's own reader waits for ever for a chunk that is gone. These requests are answered either way.
        """
        body = bytearray()
        seq = 0
        while len(body) < size:
            chunk = await self._messages.next(f"$O.{self._bucket}.C.{nuid}", after=seq)
            if chunk is None:
                return None
            body += chunk.body
            seq = chunk.seq
        return bytes(body) if len(body) == size else None

    async def fresh(self, name: str) -> ObjectRef | None:
        async with self._bounded():
            store = await self._open()
            info = await self._info(name)
            if info is None or not info.nuid:
                return None
            first = await self._messages.next(f"$O.{self._bucket}.C.{info.nuid}", after=0)
            kept_s = (await store.status()).stream_info.config.max_age or 0.0
            if first is None or (kept_s and (now_ns() - first.stored_ns) / 1e9 > kept_s / 2):
                return None
            digest = base64.urlsafe_b64decode((info.digest or "").removeprefix("SHA-256=")).hex()
            return ObjectRef(object=name, size=info.size or 0, digest=digest)

    async def _info(self, name: str) -> ObjectInfo | None:
        try:
            return await (await self._open()).get_info(name)
        except (nats.js.errors.ObjectNotFoundError, nats.js.errors.ObjectDeletedError):
            return None

    async def names(self) -> list[str]:
        async with self._bounded():
            try:
                found = await (await self._open()).list(ignore_deletes=True)
            except nats.js.errors.NotFoundError:
                return []
        return [info.name for info in sorted(found, key=lambda info: info.mtime or "") if info.name]

    async def delete(self, name: str) -> None:
        async with self._bounded():
            try:
                await (await self._open()).delete(name)
            except nats.js.errors.NotFoundError:
                return
