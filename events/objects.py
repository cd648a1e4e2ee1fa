"""Bodies too large for the log, and snapshots: named bytes with a digest."""

from __future__ import annotations

import hashlib
from typing import Protocol

import nats.errors
import nats.js.errors
from nats.js.object_store import ObjectStore

from gpukeeper.events.connection import Connection
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.work import ObjectRef


class Objects(Protocol):
    """A bucket of named bytes."""

    async def put(self, name: str, body: bytes) -> ObjectRef:
        """Store ``body`` under ``name``, replacing what was there."""
        ...

    async def get(self, name: str) -> bytes | None:
        """The bytes, or None where there are none (any more)."""
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
    """Store a body under its own digest, so that the same body is stored once and a repeated submission is the same."""
    return await objects.put(digest_of(body), body)


async def get_body(objects: Objects, ref: ObjectRef) -> bytes | None:
    """The bytes of ``ref``, or None where they are gone or are not what the digest says."""
    body = await objects.get(ref.object)
    return body if body is not None and digest_of(body) == ref.digest else None


class MemoryObjects:
    """Objects in a dict."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    async def put(self, name: str, body: bytes) -> ObjectRef:
        self._bodies.pop(name, None)
        self._bodies[name] = bytes(body)
        return ObjectRef(object=name, size=len(body), digest=digest_of(body))

    async def get(self, name: str) -> bytes | None:
        return self._bodies.get(name)

    async def names(self) -> list[str]:
        return list(self._bodies)

    async def delete(self, name: str) -> None:
        self._bodies.pop(name, None)


class JetStreamObjects:
    """Objects in a JetStream object store."""

    def __init__(self, connection: Connection, bucket: str) -> None:
        self._connection = connection
        self._bucket = bucket
        self._store: ObjectStore | None = None

    async def _open(self) -> ObjectStore:
        if self._store is None:
            self._store = await self._connection.js.object_store(self._bucket)
        return self._store

    async def put(self, name: str, body: bytes) -> ObjectRef:
        try:
            store = await self._open()
            await store.put(name, body)
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise LogUnavailable(f"bucket {self._bucket}: {error or type(error).__name__}") from error
        return ObjectRef(object=name, size=len(body), digest=digest_of(body))

    async def get(self, name: str) -> bytes | None:
        try:
            store = await self._open()
            return (await store.get(name)).data or b""
        except (nats.js.errors.ObjectNotFoundError, nats.js.errors.ObjectDeletedError):
            return None
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise LogUnavailable(f"bucket {self._bucket}: {error or type(error).__name__}") from error

    async def names(self) -> list[str]:
        try:
            store = await self._open()
            found = await store.list(ignore_deletes=True)
        except nats.js.errors.NotFoundError:
            return []
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise LogUnavailable(f"bucket {self._bucket}: {error or type(error).__name__}") from error
        return [info.name for info in sorted(found, key=lambda info: info.mtime or "") if info.name]

    async def delete(self, name: str) -> None:
        try:
            store = await self._open()
            await store.delete(name)
        except nats.js.errors.NotFoundError:
            return
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise LogUnavailable(f"bucket {self._bucket}: {error or type(error).__name__}") from error
