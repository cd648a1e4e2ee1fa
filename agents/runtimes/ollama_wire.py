"""What Ollama sends and takes, as records. Pure: no connection, no clock.

Figures are taken as they come. One that is no whole number becomes None; one that is impossible is kept, so
that the placement guard can name it.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from gpukeeper.agents.runtimes.http import error_words
from gpukeeper.agents.runtimes.port import PullProgress, RuntimeFailure
from gpukeeper.events.readings import ResidentModel
from gpukeeper.events.reasons import Reason
from gpukeeper.events.work import JobResult, Work

#: An end further ahead than this means for ever: a negative ``keep_alive`` becomes some 292 years.
PINNED_AFTER = timedelta(days=365 * 50)

#: Options that belong to the loaded runner: a request that differs in one of them makes Ollama load again.
RUNNER_OPTIONS = frozenset(
    {"num_ctx", "num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "num_thread", "low_vram", "numa"}
)

_TIME = re.compile(r"\+?(-?\d{4,})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(\.\d+)?([Zz]|[+-]\d\d:\d\d)?", re.ASCII)
_TIME_CHARS_MAX = 64
_STATUS_CHARS_MAX = 200
_INT_MAX = 2**63 - 1


class PsRow(msgspec.Struct):
    name: str | None = None
    model: str | None = None
    size: Any = None
    #: Left out by old servers when it is 0 (ollama#4840).
    size_vram: Any = 0
    expires_at: Any = None
    context_length: Any = None


class Ps(msgspec.Struct):
    models: list[PsRow]


class Tag(msgspec.Struct):
    name: str | None = None
    model: str | None = None
    size: Any = None

    @property
    def named(self) -> str:
        return self.name or self.model or ""


class Tags(msgspec.Struct):
    models: list[Tag]


class Version(msgspec.Struct):
    version: str


class Message(msgspec.Struct):
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Any] | None = None


class Record(msgspec.Struct):
    """One line of a generate or a chat."""

    response: str | None = None
    thinking: str | None = None
    message: Message | None = None
    done: bool = False
    done_reason: str | None = None
    model: str | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    error: Any = None

    @property
    def calls(self) -> list[Any]:
        return (self.message.tool_calls or []) if self.message is not None else []

    @property
    def thinks(self) -> bool:
        """Whether the record shows progress that is no text: thinking, or a call of a tool."""
        return bool(self.thinking or (self.message is not None and self.message.thinking) or self.calls)

    def text_of(self, *, chat: bool, path: str) -> str:
        """The text of this record; the last one may have none.

        Raises:
            RuntimeFailure: the record has neither text nor an end, so it is not one of this protocol.
        """
        said = None if self.message is None else self.message.content or ""
        text = said if chat else self.response
        if text is None and not self.done and not self.thinks:
            raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, f"{path}: a record without text and without an end")
        return text or ""


class Pull(msgspec.Struct):
    """One line of a pull."""

    status: str | None = None
    completed: Any = None
    total: Any = None
    error: Any = None

    def progress(self, path: str) -> PullProgress:
        """How far it is. Raises RuntimeFailure, with Ollama's words, where it says that it has failed."""
        if self.error is not None:
            raise RuntimeFailure(Reason.PROVISION_FAILED, f"{path}: {error_words(self.error)}")
        return PullProgress(
            status=(self.status or "")[:_STATUS_CHARS_MAX],
            completed_bytes=positive(self.completed),
            total_bytes=positive(self.total),
        )


class Embed(msgspec.Struct):
    embeddings: list[list[float]]
    model: str | None = None
    prompt_eval_count: int | None = None


ps_decoder = msgspec.json.Decoder(Ps)
tags_decoder = msgspec.json.Decoder(Tags)
version_decoder = msgspec.json.Decoder(Version)
record_decoder = msgspec.json.Decoder(Record)
pull_decoder = msgspec.json.Decoder(Pull)
embed_decoder = msgspec.json.Decoder(Embed)


def resident(ps: Ps, now: datetime) -> tuple[ResidentModel, ...]:
    """The rows of ``/api/ps`` at the time ``now``.

    Raises:
        RuntimeFailure: a row without a name. Something is held then, and nobody knows what.
    """
    return tuple(_row(row, now) for row in ps.models)


def named_tags(tags: Tags) -> list[Tag]:
    """The rows of ``/api/tags``. Raises RuntimeFailure for one without a name."""
    if any(not tag.named for tag in tags.models):
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, "/api/tags: a model without a name")
    return tags.models


def _row(row: PsRow, now: datetime) -> ResidentModel:
    name = row.name or row.model
    if not name:
        raise RuntimeFailure(Reason.RUNTIME_BAD_REPLY, "/api/ps: a row without a name")
    expires = row.expires_at if isinstance(row.expires_at, str) and len(row.expires_at) <= _TIME_CHARS_MAX else None
    ahead = None if expires is None else time_ahead(expires, now)
    return ResidentModel(
        model=name,
        size_bytes=_whole(row.size),
        vram_bytes=_whole(row.size_vram),
        context_length=positive(row.context_length),
        expires_at=expires,
        pinned=ahead is not None and ahead > PINNED_AFTER,
        stopping=ahead is not None and ahead < timedelta(0),
    )


def time_ahead(text: str, now: datetime) -> timedelta | None:
    """How far ``text`` (RFC 3339, any year) lies after ``now``; None where it is no time.

    What lies outside the calendar is as far as can be told: :data:`datetime.timedelta.max` or its minimum.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = match.groups()
    try:
        when = datetime(*(int(part) for part in (year, month, day, hour, minute, second)), tzinfo=UTC)
        when += timedelta(seconds=float(fraction or 0))
        if zone and zone not in "Zz":
            offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[4:6]))
            when += offset if zone[0] == "-" else -offset
    except (ValueError, OverflowError):
        if not (1 <= int(month) <= 12 and 1 <= int(day) <= 31 and int(hour) <= 24 and int(minute) <= 60):
            return None
        return timedelta.max if int(year) > now.year else timedelta.min
    return when - now


def _whole(value: object) -> int | None:
    """``value`` where it is a whole number that 64 bits hold, sign and all."""
    return value if type(value) is int and -_INT_MAX <= value <= _INT_MAX else None


def positive(value: object) -> int | None:
    whole = _whole(value)
    return whole if whole is not None and whole > 0 else None


def options(work: Work) -> dict[str, Any]:
    """Ollama's ``options``: those of the job as they are, then the neutral settings that were given."""
    named = {
        "num_predict": work.max_tokens,
        "temperature": work.temperature,
        "top_p": work.top_p,
        "top_k": work.top_k,
        "seed": work.seed,
        "stop": work.stop,
    }
    return {**(work.options or {}), **{key: value for key, value in named.items() if value is not None}}


def runner_options(work: Work | None) -> dict[str, Any]:
    """Those of the job's options that a load must have, so that the work does not load once more."""
    given = (work.options or {}) if work is not None else {}
    return {key: value for key, value in given.items() if key in RUNNER_OPTIONS}


def load_options(work: Work) -> str:
    """:func:`runner_options` as one text, the same for the same options in any order; empty where there are none."""
    given = runner_options(work)
    return msgspec.json.encode(given, order="sorted").decode() if given else ""


def result(record: Record, text: str, calls: list[Any], *, chat: bool) -> JobResult:
    """The whole answer, from its last record and what came before."""
    message: dict[str, Any] | None = None
    if chat:
        message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = calls
    return JobResult(
        text=None if chat else text,
        message=message,
        finish_reason=record.done_reason,
        prompt_tokens=record.prompt_eval_count,
        completion_tokens=record.eval_count,
        model=record.model,
    )
