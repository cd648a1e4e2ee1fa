"""Facts about the site as a whole."""

from __future__ import annotations

from typing import ClassVar

from gpukeeper.events.fact import Fact
from gpukeeper.events.reasons import Reason


class LeaderElected(Fact, frozen=True, kw_only=True):
    """A scheduler took the lease. A hint about who works: sequences on subjects are what makes decisions safe."""

    TYPE: ClassVar[str] = "gpuq.site.leader_elected.v1"

    instance_id: str
    lease_revision: int
    version: str


class CommandRefused(Fact, frozen=True, kw_only=True):
    """An operator's command was not carried out."""

    TYPE: ClassVar[str] = "gpuq.site.command_refused.v1"

    command_seq: int
    actor: str
    reason: Reason
    detail: str
    job: str | None = None
