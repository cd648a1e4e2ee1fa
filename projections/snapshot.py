"""Snapshots of the site in the object store, so that a start is snapshot + tail.

A snapshot is keyed by (projection, code version, sequence), and names an event of the log it belongs to. One that is
corrupt, of other code, of another log or of another retention is passed over with a logged reason.
"""

from __future__ import annotations

import hashlib
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


class _Snapshot(msgspec.Struct, frozen=True):
    code: str
    seq: int
    stored_ns: int
    digest: str
    state: msgspec.Raw


_encode = msgspec.msgpack.Encoder().encode
_decode_snapshot = msgspec.msgpack.Decoder(_Snapshot).decode
_decode_state = msgspec.msgpack.Decoder(SiteState).decode


@cache
def code_version() -> str:
    """A digest of the code that folds: other code, other snapshots."""
    digest = hashlib.sha256()
    for package in (gpukeeper.events, gpukeeper.projections):
        for folder in package.__path__:
            for module in sorted(Path(folder).glob("*.py")):
                digest.update(module.name.encode())
                digest.update(module.read_bytes())
    return digest.hexdigest()[:12]


def encode_state(site: Site) -> bytes:
    """The canonical bytes of the folded state: equal states, equal bytes."""
    return _encode(site.state())


def digest(site: Site) -> str:
    """A short name for the folded state."""
    return hashlib.sha256(encode_state(site)).hexdigest()[:16]


async def save(objects: Objects, site: Site) -> str:
    """Store a snapshot and drop all but the newest few. Returns its name."""
    state = encode_state(site)
    snapshot = _Snapshot(
        code=code_version(),
        seq=site.seq,
        stored_ns=site.stored_ns,
        digest=hashlib.sha256(state).hexdigest(),
        state=msgspec.Raw(state),
    )
    name = f"{_PREFIX}-{snapshot.code}-{snapshot.seq:020d}"
    await objects.put(name, _encode(snapshot))
    names = [other for other in await objects.names() if other.startswith(f"{_PREFIX}-{snapshot.code}-")]
    for old in sorted(names)[:-_KEPT]:
        await objects.delete(old)
    return name


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
        body = await objects.get(name)
        site, reason = (None, "it is gone") if body is None else await _restore(body, log, retention)
        if site is not None:
            return site
        _log.warning("snapshot_passed_over", snapshot=name, reason=reason)
    return None


async def _restore(body: bytes, log: Log, retention: Retention | None) -> tuple[Site | None, str]:
    try:
        snapshot = _decode_snapshot(body)
        state_bytes = bytes(snapshot.state)
        if hashlib.sha256(state_bytes).hexdigest() != snapshot.digest:
            return None, "its digest does not match"
        state = _decode_state(state_bytes)
    except (msgspec.MsgspecError, RecursionError) as error:
        return None, f"it is corrupt: {error}"
    if retention is not None and state.retention != retention:
        return None, "it was made with another retention"
    if snapshot.seq:
        event = await log.get(snapshot.seq)
        if event is None or event.stored_ns != snapshot.stored_ns:
            return None, "it belongs to another log"
    return Site.restore(state), ""
