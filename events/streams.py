"""Setting up a site's streams, idempotently, and saying what is wrong with existing ones."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
import nats.errors
import nats.js.errors
from nats.js.api import (
    DiscardPolicy,
    KeyValueConfig,
    ObjectStoreConfig,
    RetentionPolicy,
    StorageType,
    StoreCompression,
    StreamConfig,
)

from gpukeeper.events import subjects
from gpukeeper.events.connection import Connection
from gpukeeper.events.errors import IncompatibleStream, LogUnavailable


class SiteStreams(msgspec.Struct, frozen=True, kw_only=True):
    """What may be chosen about a site's streams. 0 means no limit. The log itself has none: facts are kept for ever."""

    replicas: int = 1
    beats_max_age_s: float = 72 * 3600.0
    payload_ttl_s: float = 7 * 86_400.0
    lease_ttl_s: float = 6.0


_KEPT = "facts are kept for ever: the next append rests on the last sequence of its subject"
_OWN = "what stands in it must be what was published to it, and nothing else"

#: Settings that every stream of a site must have, with the reason that is shown.
_RULES: dict[str, tuple[Any, str]] = {
    "retention": (RetentionPolicy.LIMITS, "readers may not remove what they read"),
    "no_ack": (False, "an append must be acknowledged"),
    "sealed": (False, "a sealed stream takes nothing"),
    "allow_msg_counter": (False, "a counter takes no events"),
    "mirror": (None, _OWN),
    "sources": (None, _OWN),
    "subject_transform": (None, _OWN),
}
#: Settings of the log alone.
_LOG_RULES: dict[str, tuple[Any, str]] = {
    "deny_delete": (True, "the log is an audit trail: nobody may delete from it"),
    "deny_purge": (True, "the log is an audit trail: nobody may purge it"),
    "allow_rollup_hdrs": (False, "a rollup header would let a publisher erase the log"),
    "allow_msg_ttl": (False, "a message may not expire by its publisher's word"),
    "allow_msg_schedules": (False, "schedules turn rollup on and deny_purge off"),
    "storage": (StorageType.FILE, "facts must be there after a restart of the server"),
    "max_msgs_per_subject": (-1, "older facts of an aggregate are still facts"),
}
#: Limits that every stream must be without, and those that the log must be without.
_NO_LIMITS = {
    "max_msg_size": "what the server takes in one message, the stream must take too",
    "max_consumers": "every process reads through consumers of its own",
}
_LOG_NO_LIMITS = {"max_age": _KEPT, "max_bytes": _KEPT, "max_msgs": _KEPT}


def log_config(wanted: SiteStreams) -> StreamConfig:
    return StreamConfig(
        name=subjects.LOG_STREAM,
        subjects=list(subjects.LOG_SUBJECTS),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        num_replicas=wanted.replicas,
        discard=DiscardPolicy.OLD,
        duplicate_window=120,
        deny_delete=True,
        deny_purge=True,
        allow_direct=True,
        compression=StoreCompression.S2,
    )


def beats_config(wanted: SiteStreams) -> StreamConfig:
    return StreamConfig(
        name=subjects.BEATS_STREAM,
        subjects=list(subjects.BEAT_SUBJECTS),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        num_replicas=wanted.replicas,
        max_age=wanted.beats_max_age_s,
        duplicate_window=30,
        allow_direct=True,
        compression=StoreCompression.S2,
    )


async def ensure_site(connection: Connection, wanted: SiteStreams | None = None) -> None:
    """Create what is missing; leave alone what fits.

    Raises:
        IncompatibleStream: an existing stream has a setting that gpukeeper cannot work with, or the server refuses
            one that is wanted; the error names it.
        LogUnavailable: the server did not answer, or has no leader just now.
    """
    wanted = wanted or SiteStreams()
    try:
        for config in (log_config(wanted), beats_config(wanted)):
            await _ensure_stream(connection, config)
        await _ensure_bucket(connection, wanted)
        await _ensure_objects(connection, subjects.PAYLOADS_BUCKET, wanted.payload_ttl_s, wanted.replicas)
        await _ensure_objects(connection, subjects.SNAPSHOTS_BUCKET, 0, wanted.replicas)
    except (TimeoutError, nats.errors.Error, OSError) as error:
        raise LogUnavailable(f"cannot set up the streams: {error or type(error).__name__}") from error


async def problems(connection: Connection) -> list[str]:
    """What is wrong with the streams that exist, in words; for `gpuq doctor`."""
    found: list[str] = []
    for config in (log_config(SiteStreams()), beats_config(SiteStreams())):
        assert config.name is not None
        try:
            info = await connection.js.stream_info(config.name)
        except nats.js.errors.NotFoundError:
            found.append(f"stream {config.name} does not exist yet; `gpuq up` or `gpuq scheduler` creates it")
            continue
        found.extend(f"stream {config.name}: {problem}" for problem in _misfits(config, info.config))
    try:
        await lease_ttl_s(connection)
    except IncompatibleStream as error:
        found.append(error.message)
    except nats.js.errors.NotFoundError:
        # Said of the streams already: they are made together.
        pass
    return found


async def _ensure_stream(connection: Connection, config: StreamConfig) -> None:
    assert config.name is not None
    try:
        existing = (await connection.js.stream_info(config.name)).config
    except nats.js.errors.NotFoundError:
        try:
            await connection.js.add_stream(config)
        except nats.js.errors.ServiceUnavailableError:
            raise
        except nats.js.errors.APIError as error:
            if error.err_code != _NAME_IN_USE:
                raise IncompatibleStream(f"cannot create stream {config.name}: {error.description}") from error
            # Another process created it in the same moment: judge what it made.
            existing = (await connection.js.stream_info(config.name)).config
        else:
            return
    misfits = _misfits(config, existing)
    if misfits:
        raise IncompatibleStream(
            f"stream {config.name} exists with other settings: {'; '.join(misfits)}",
            stream=config.name,
            settings=misfits,
        )


def _misfits(wanted: StreamConfig, existing: StreamConfig) -> list[str]:
    found: list[str] = []
    missing = set(wanted.subjects or ()) - set(existing.subjects or ())
    if missing:
        found.append(f"subjects lacks {', '.join(sorted(missing))}")
    is_log = wanted.name == subjects.LOG_STREAM
    for name, (value, why) in (_RULES | (_LOG_RULES if is_log else {})).items():
        is_value = getattr(existing, name)
        if (is_value or None) != (value or None):
            found.append(f"{name} is {is_value!r}, must be {value!r}: {why}")
    for name, why in (_NO_LIMITS | (_LOG_NO_LIMITS if is_log else {})).items():
        limit = getattr(existing, name)
        if (limit or 0) > 0:
            found.append(f"{name} is {limit!r}, must be unlimited: {why}")
    if is_log:
        window_s = existing.duplicate_window or 0
        if window_s < _DUPLICATE_WINDOW_S_MIN:
            found.append(
                f"duplicate_window is {window_s:g} s, must be at least {_DUPLICATE_WINDOW_S_MIN:g} s: "
                "an append that went unanswered is sent again"
            )
    return found


#: The server's code for a name that has other settings.
_NAME_IN_USE = 10058
#: Longer than an append is chased, with room for a publish that is still on its way.
_DUPLICATE_WINDOW_S_MIN = 60.0


async def _ensure_bucket(connection: Connection, wanted: SiteStreams) -> None:
    try:
        await connection.js.key_value(subjects.LEASE_BUCKET)
    except nats.js.errors.NotFoundError:
        config = KeyValueConfig(
            bucket=subjects.LEASE_BUCKET, ttl=wanted.lease_ttl_s, history=1, replicas=wanted.replicas
        )
        await _unless_there(connection.js.create_key_value(config))
    else:
        await lease_ttl_s(connection)


#: The stream behind the bucket of the lease.
_LEASE_STREAM = f"KV_{subjects.LEASE_BUCKET}"


async def lease_ttl_s(connection: Connection) -> float:
    """How long the bucket remembers a lease that nobody renews.

    Raises:
        IncompatibleStream: for ever.
        Whatever the client raises where the server does not answer.
    """
    ttl_s = (await connection.js.stream_info(_LEASE_STREAM)).config.max_age or 0.0
    if ttl_s <= 0:
        raise IncompatibleStream(
            f"bucket {subjects.LEASE_BUCKET} forgets nothing (its ttl is 0): the lease of a scheduler that died would "
            "never end",
            stream=_LEASE_STREAM,
        )
    return ttl_s


async def set_lease_ttl(connection: Connection, ttl_s: float) -> None:
    """Let the bucket forget a lease after another time. Raises what the client raises."""
    config = (await connection.js.stream_info(_LEASE_STREAM)).config
    # The server wants a window of duplicates that is no longer than what it remembers.
    window_s = min(_BUCKET_WINDOW_S_MAX, ttl_s)
    await connection.js.update_stream(config.evolve(max_age=ttl_s, duplicate_window=window_s))


_BUCKET_WINDOW_S_MAX = 120.0


async def _ensure_objects(connection: Connection, bucket: str, ttl_s: float, replicas: int) -> None:
    try:
        await connection.js.object_store(bucket)
    except nats.js.errors.NotFoundError:
        config = ObjectStoreConfig(bucket=bucket, ttl=ttl_s or None, replicas=replicas)
        await _unless_there(connection.js.create_object_store(bucket, config=config))


async def _unless_there(creating: Awaitable[object]) -> None:
    try:
        await creating
    except nats.js.errors.BadRequestError as error:
        if error.err_code != _NAME_IN_USE:
            raise
        # Another process, with other settings, created it in the same moment. Either will do.
