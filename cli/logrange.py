"""Which events of the log somebody wants to see."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from fnmatch import fnmatchcase

import msgspec

from gpukeeper.cli.errors import WrongUsage
from gpukeeper.cli.words import type_name
from gpukeeper.events import subjects
from gpukeeper.events.codec import Event, Submitted
from gpukeeper.events.ids import require_token
from gpukeeper.events.log import Log
from gpukeeper.projections.device import device_key

_AGO = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SEQ = re.compile(r"\d{1,19}")


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """What must hold of an event for it to be shown; None and empty do not matter."""

    job: str | None = None
    #: An id, or ``host/id``.
    device: str | None = None
    host: str | None = None
    producer: str | None = None
    #: Types as they are shown, or with ``gpuq.`` and ``.v1``; ``*`` stands for anything. Any of them.
    types: tuple[str, ...] = ()
    #: The submission of ``job``: it does not say which job it became.
    submission_seq: int | None = None

    def patterns(self) -> tuple[str, ...]:
        """Subjects that hold all that can match, for the server to filter; empty for the whole log.

        Raises:
            InvalidId: a name cannot stand in a subject.
        """
        if self.job is not None:
            job = require_token(self.job, "--job")
            return (f"gpuq.ev.job.{job}", f"gpuq.ev.route.*.{job}", "gpuq.ev.device.*.*", "gpuq.submit.*", "gpuq.cmd.*")
        if self.device is not None:
            host, _, device = self.device.rpartition("/")
            place = require_token(host, "--device") if host else "*"
            return (f"gpuq.ev.device.{place}.{require_token(device, '--device')}",)
        if self.host is not None:
            return subjects.followed_by_agent(self.host)
        return ()

    def matches(self, event: Event) -> bool:
        """Whether all that is asked for holds of ``event``."""
        return (
            (not self.types or any(_is_type(event, wanted) for wanted in self.types))
            and (self.job is None or self._is_of_job(event, self.job))
            and (self.device is None or _is_of_device(event, self.device))
            and (self.host is None or self.host in _hosts_of(event))
            and (self.producer is None or self.producer == _producer_of(event))
        )

    def _is_of_job(self, event: Event, job: str) -> bool:
        if isinstance(event.data, Submitted):
            return event.seq == self.submission_seq
        if getattr(event.data, "job", None) == job:
            return True
        return event.envelope is not None and event.envelope.correlationid == job


def _is_type(event: Event, wanted: str) -> bool:
    name = type_name(event)
    full = event.envelope.type if event.envelope is not None else name
    return fnmatchcase(name, wanted) or fnmatchcase(full, wanted)


def _is_of_device(event: Event, wanted: str) -> bool:
    parts = event.stored.subject.split(".")
    if parts[2] != "device":
        return False
    return wanted in (parts[-1], device_key(parts[-2], parts[-1]))


def _hosts_of(event: Event) -> tuple[str, ...]:
    parts = event.stored.subject.split(".")
    if parts[1] != "ev" or parts[2] not in ("host", "device", "route", "runtime"):
        return ()
    return (parts[3],)


def _producer_of(event: Event) -> str | None:
    producer = getattr(event.data, "producer", None)
    if isinstance(producer, str):
        return producer
    return None if event.envelope is None else event.envelope.actor


def parse_moment(text: str, option: str, now: datetime) -> int | datetime:
    """A sequence, a moment, or a time ago (``90s``, ``10m``, ``2h``, ``1d``).

    Raises:
        WrongUsage: it is none of these.
    """
    if _SEQ.fullmatch(text):
        return int(text)
    if ago := _AGO.fullmatch(text):
        return datetime.fromtimestamp(now.timestamp() - float(ago[1]) * _UNIT_S[ago[2]], UTC)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise WrongUsage(
            f"{option} {text[:80]!r}: must be a sequence (1234), a time (2025-10-19T14:00:00Z), or how long ago (10m)"
        ) from None
    return moment if moment.tzinfo is not None else moment.astimezone()


async def seq_before(log: Log, moment: datetime) -> int:
    """The last sequence that was stored before ``moment``, by halving: the log's times rise with its sequences.

    Raises:
        LogUnavailable: the log did not answer.
    """
    low, high = 0, await log.last_seq()
    wanted_ns = int(moment.timestamp() * 1e9)
    while low < high:
        middle = (low + high + 1) // 2
        stored = await log.get(middle)
        # What has aged out of the log was stored before what is still there.
        if stored is None or stored.stored_ns < wanted_ns:
            low = middle
        else:
            high = middle - 1
    return low
