"""Commands of operators: facts about what somebody asked for, each with an actor and a reason."""

from __future__ import annotations

from typing import ClassVar

from gpukeeper.events.fact import Fact


class Cancel(Fact, frozen=True, kw_only=True):
    """End this job, whatever its state."""

    TYPE: ClassVar[str] = "gpuq.operator.cancel.v1"

    job: str
    reason: str = ""
