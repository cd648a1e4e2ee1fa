"""Snapshots of the site in the object store, so that a start is snapshot + tail.

A snapshot is keyed by (projection, code version, sequence), and names an event of the log it belongs to. One that is
corrupt, of other code, of another log or of another retention is passed over with a logged reason.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import msgspec
import structlog

import gpukeeper.events
import gpukeeper.projections
from gpukeeper.events.errors import LogUnavailable
from gpukeeper.events.log import Log
from gpukeeper.events.objects import Objects
from gpukeeper.projections.site import Retention, Site, SiteState

_log = structlog.get_logger("gpukeeper.snapshot")

_PREFIX = "site"
_KEPT = 3
_KEPT_OF_OTHERS = 1


class _Snapshot(msgspec.Struct, frozen=True):
    code: str
    seq: int
    stored_ns: int
    #: SHA-256 of ``state``, which is the compressed :class:`SiteState`.
    digest: str
    state: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode
_decode_state = msgspec.msgpack.Decoder(SiteState).decode


#: Modules that folding does not import: a change to them changes no state, and must not cost everybody a full fold.
_NOT_FOLDED = frozenset(
    {
        # How the log and its buckets are reached, made and waited for.
        "events/catchup.py",
        "events/client.py",
        "events/connection.py",
        "events/follower.py",
        "events/jetstream.py",
        "events/memory.py",
        "events/objects.py",
        "events/services.py",
        "events/streams.py",
        "events/tasks.py",
        # How events come to be written.
        "events/clock.py",
        "events/instants.py",
        "events/proposal.py",
        "events/recorder.py",
        # How producers ask what became of a job.
        "events/ask.py",
        "events/endpoints.py",
        # What is derived from the types, or only scheduler and agents read.
        "events/schema.py",
        "projections/alone.py",
        "projections/hostview.py",
        "projections/registries.py",
        # When folding begins and ends.
        "projections/runner.py",
    }
)


@cache
def code_version() -> str:
    """A digest of the code that folds: other code, other snapshots."""
    packages = {"events": gpukeeper.events.__path__, "projections": gpukeeper.projections.__path__}
    digest = hashlib.sha256()
    for name, path in folding_modules(packages):
        digest.update(name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def folding_modules(packages: Mapping[str, Iterable[str]]) -> list[tuple[str, Path]]:
    """Every module of ``packages`` (name -> folders) that folding depends on, in order, with folders in folders."""
    found = [
        (f"{package}/{path.relative_to(folder).as_posix()}", path)
        for package, folders in packages.items()
        for folder in folders
        for path in Path(folder).rglob("*.py")
    ]
    return sorted((name, path) for name, path in found if name not in _NOT_FOLDED)


def encode_state(site: Site) -> bytes:
    """The canonical bytes of the folded state: equal states, equal bytes."""
    return _encode(site.state())


def digest(site: Site) -> str:
    """A short name for the folded state."""
    return hashlib.sha256(encode_state(site)).hexdigest()[:16]


async def save(objects: Objects, site: Site) -> str:
    """Store a snapshot. Returns its name.

    All but the newest few are dropped, and all of other code but the newest, which is for who goes back to that code.
    """
    seq, stored_ns, state = site.seq, site.stored_ns, encode_state(site)
    name = f"{_PREFIX}-{code_version()}-{seq:020d}"
    await objects.put(name, await asyncio.to_thread(_pack, seq, stored_ns, state))
    names = [other for other in await objects.names() if other.startswith(f"{_PREFIX}-")]
    mine = [other for other in names if other.startswith(f"{_PREFIX}-{code_version()}-")]
    others = [other for other in names if other not in mine]
    for old in (*sorted(mine)[:-_KEPT], *others[:-_KEPT_OF_OTHERS]):
        await objects.delete(old)
    return name


def _pack(seq: int, stored_ns: int, state: bytes) -> bytes:
    """Work for a thread: the loop goes on meanwhile."""
    packed = zlib.compress(state, level=1)
    digest = hashlib.sha256(packed).hexdigest()
    return _encode(_Snapshot(code=code_version(), seq=seq, stored_ns=stored_ns, digest=digest, state=packed))


async def load(objects: Objects, log: Log, retention: Retention | None) -> Site | None:
    """The newest snapshot that fits this code, this log and this retention (any, where it is None), or None."""
    try:
        names = sorted((n for n in await objects.names() if n.startswith(f"{_PREFIX}-")), reverse=True)
    except LogUnavailable as error:
        _log.warning("snapshots_unreadable", reason=str(error))
        return None
    mine = [name for name in names if name.startswith(f"{_PREFIX}-{code_version()}-")]
    if names and not mine:
        _log.info("snapshot_passed_over", reason="all were made by other code", found=len(names))
    for name in mine:
        try:
            body = await objects.get(name)
        except LogUnavailable as error:
            # One that cannot be read is no reason not to start: an older one, or the log itself, says the same.
            _log.warning("snapshot_passed_over", snapshot=name, reason=str(error))
            continue
        site, reason = (None, "it is gone") if body is None else await _restore(body, log, retention)
        if site is not None:
            return site
        _log.warning("snapshot_passed_over", snapshot=name, reason=reason)
    return None


async def _restore(body: bytes, log: Log, retention: Retention | None) -> tuple[Site | None, str]:
    try:
        snapshot = _decode_snapshot(body)
        if hashlib.sha256(snapshot.state).hexdigest() != snapshot.digest:
            return None, "its digest does not match"
        state = _decode_state(zlib.decompress(snapshot.state))
    except (msgspec.MsgspecError, RecursionError, zlib.error) as error:
        return None, f"it is corrupt: {error}"
    if retention is not None and state.retention != retention:
        return None, "it was made with another retention"
    misfit = await _misfit(snapshot, log)
    return (None, misfit) if misfit else (Site.restore(state), "")


async def _misfit(snapshot: _Snapshot, log: Log) -> str | None:
    """Why the snapshot's state cannot be folded on with what the log holds now, or None."""
    if not snapshot.seq:
        return None
    event = await log.get(snapshot.seq)
    if event is not None:
        return None if event.stored_ns == snapshot.stored_ns else "it belongs to another log"
    # Its event has aged out, or never was in this log. What follows must begin right after it.
    following = await log.get(snapshot.seq + 1)
    if following is not None:
        return None if following.stored_ns >= snapshot.stored_ns else "it belongs to another log"
    if await log.last_seq() == snapshot.seq:
        return None
    return "it belongs to another log, or what came right after it has aged out"
