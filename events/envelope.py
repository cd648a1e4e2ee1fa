"""The CloudEvents 1.0 envelope around every fact (structured JSON mode)."""

from __future__ import annotations

import msgspec

CONTENT_TYPE = "application/cloudevents+json"


class Envelope(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who said what about which aggregate, when, and because of what.

    Attributes that a newer version adds are ignored here and kept in the stored bytes.
    """

    specversion: str
    #: A ULID: the identity of the event. Two stored messages with one id are one event.
    id: str
    source: str
    type: str
    #: The aggregate: a job, ``host/device``, ``host/runtime``, a host, or the site.
    subject: str
    #: The writer's clock. The order of events is their sequence; their age is the server's timestamp.
    time: str
    data: msgspec.Raw
    #: The job or command this belongs to.
    correlationid: str | None = None
    #: The id of the event that caused this one.
    causationid: str | None = None
    actor: str | None = None
    epoch: int | None = None
    traceparent: str | None = None
