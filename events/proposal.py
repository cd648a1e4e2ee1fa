"""What a decision wants appended: pure data, before ids and clocks are stamped on it."""

from __future__ import annotations

import msgspec

from gpukeeper.events.fact import Fact


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, one event."""

    subject: str
    fact: Fact
    #: Last sequence of the literal subject that the decision rests on; None = no condition.
    expected: int | None
    #: The aggregate's name for the envelope.
    aggregate: str
    correlationid: str | None = None
    causationid: str | None = None
    actor: str | None = None
    epoch: int | None = None
