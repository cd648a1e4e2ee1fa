"""Between stored bytes and facts.

Decoding is total: a tag nobody here knows becomes :class:`Unknown`, bytes that are no event become
:class:`Unreadable`, and both keep the bytes they came from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gpukeeper.events.catalog import BY_TYPE
from gpukeeper.events.envelope import Envelope
from gpukeeper.events.fact import Fact
from gpukeeper.events.ids import cleaned_token
from gpukeeper.events.log import Stored
from gpukeeper.events.subjects import SUBMIT_PREFIX
from gpukeeper.events.upcasters import STEPS, Step, upcast


class Unknown(msgspec.Struct, frozen=True):
    """A well-formed event with a tag of a newer version."""

    type: str
    data: msgspec.Raw


class Unreadable(msgspec.Struct, frozen=True):
    """Bytes on an event subject that are no event, or a known fact with impossible contents."""

    problem: str


class Submitted(msgspec.Struct, frozen=True):
    """Whatever a producer sent, not judged yet: the bare bytes."""

    #: Always a token: what else stands in the subject is cleaned.
    producer: str
    raw: bytes
    #: Whether the producer named itself with what is no token.
    misnamed: bool = False


class Event(msgspec.Struct, frozen=True):
    """A stored event, decoded. ``stored`` keeps the bytes, so that nothing of a newer version is lost."""

    stored: Stored
    #: None for submissions and for what is unreadable.
    envelope: Envelope | None
    data: Fact | Unknown | Unreadable | Submitted

    @property
    def seq(self) -> int:
        return self.stored.seq

    @property
    def event_id(self) -> str:
        """The envelope's id; empty where there is none."""
        return "" if self.envelope is None else self.envelope.id


_decode_envelope = msgspec.json.Decoder(Envelope).decode
_encode = msgspec.json.Encoder().encode
_decoders: dict[str, msgspec.json.Decoder[Any]] = {tag: msgspec.json.Decoder(fact) for tag, fact in BY_TYPE.items()}


def decode(stored: Stored, steps: Mapping[str, Step] = STEPS) -> Event:
    """Read one stored message. Never raises for its contents."""
    if stored.subject.startswith(SUBMIT_PREFIX):
        producer = stored.subject[len(SUBMIT_PREFIX) :]
        name = cleaned_token(producer)
        return Event(stored, None, Submitted(name, stored.body, misnamed=name != producer))
    try:
        envelope = _decode_envelope(stored.body)
        return Event(stored, envelope, _decode_data(envelope, steps))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        return Event(stored, None, Unreadable(str(error)))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # An old fact with contents that its upcaster does not expect.
        return Event(stored, None, Unreadable(f"cannot be brought up to date: {error!r}"))


def _decode_data(envelope: Envelope, steps: Mapping[str, Step]) -> Fact | Unknown:
    if envelope.type in steps:
        tag, data = upcast(envelope.type, msgspec.json.decode(envelope.data, type=dict[str, Any]), steps)
        current = BY_TYPE.get(tag)
        return Unknown(envelope.type, envelope.data) if current is None else msgspec.convert(data, current)
    decoder = _decoders.get(envelope.type)
    if decoder is None:
        return Unknown(envelope.type, envelope.data)
    fact: Fact = decoder.decode(envelope.data)
    return fact


def encode(
    fact: Fact,
    *,
    event_id: str,
    source: str,
    subject: str,
    time: str,
    correlationid: str | None = None,
    causationid: str | None = None,
    actor: str | None = None,
    epoch: int | None = None,
    traceparent: str | None = None,
) -> bytes:
    """The bytes of one event."""
    return _encode(
        Envelope(
            specversion="1.0",
            id=event_id,
            source=source,
            type=fact.TYPE,
            subject=subject,
            time=time,
            data=msgspec.Raw(_encode(fact)),
            correlationid=correlationid,
            causationid=causationid,
            actor=actor,
            epoch=epoch,
            traceparent=traceparent,
        )
    )


def event_id_of(body: bytes) -> str | None:
    """The event id inside stored bytes, or None where they are no event."""
    try:
        return _decode_envelope(body).id
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
