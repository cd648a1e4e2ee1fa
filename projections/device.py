"""Devices and the claims on their slots."""

from __future__ import annotations

import msgspec

from gpukeeper.events.device import Drained, ReclaimRequested, ReclaimWanted
from gpukeeper.events.readings import ClaimBeat


class Claim(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One taken slot. ``epoch`` is the sequence of the `claimed` fact and fences all later acts."""

    epoch: int
    job: str
    attempt: int
    slot: int
    route_seq: int
    boot_id: str
    instance_id: str
    claimed_ns: int


class ReclaimWish(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An operator's wish to have memory freed. ``seq`` is the sequence of the `reclaim_wanted` fact."""

    seq: int
    actor: str
    reason: str = ""
    runtime: str | None = None
    model: str | None = None
    vram_mb: int | None = None


class OpenRelease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A release that was asked for and has not been told the end of. ``seq`` is its generation."""

    seq: int
    runtime: str
    model: str | None = None
    job: str | None = None
    wanted_seq: int | None = None


class Device(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One device as its agent described it last."""

    host: str
    id: str
    #: Last sequence of the device's own subject.
    seq: int
    kind: str = "gpu"
    name: str = ""
    slots: int = 1
    total_mb: int | None = None
    headroom_mb: int = 0
    unschedulable: str | None = None
    parent: str | None = None
    state: str = "healthy"
    detail: str = ""
    claims: tuple[Claim, ...] = ()
    #: Who took it out of service, and why, where somebody did.
    drained: str | None = None
    #: What operators want freed, and its agent has not answered.
    wishes: tuple[ReclaimWish, ...] = ()
    #: Releases under way.
    releases: tuple[OpenRelease, ...] = ()

    @property
    def key(self) -> str:
        return device_key(self.host, self.id)

    def claim(self, epoch: int) -> Claim | None:
        for claim in self.claims:
            if claim.epoch == epoch:
                return claim
        return None

    def follows_route(self, job: str, route_seq: int) -> bool:
        """Whether a standing claim took up this route of the job."""
        return any(claim.job == job and claim.route_seq == route_seq for claim in self.claims)


class Lapse(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A claim that ended while its job had not: the evidence that the job's own end will carry."""

    host: str
    device: str
    epoch: int
    #: The `claim_lapsed` (or `released`) fact.
    seq: int
    event_id: str
    detail: str
    last_beat: ClaimBeat | None = None
    last_beat_at: str | None = None
    silent_s: float | None = None


def device_key(host: str, device: str) -> str:
    return f"{host}/{device}"


def why_drained(fact: Drained) -> str:
    """Who took the device out of service, and why, in words."""
    return f"by {fact.actor}: {fact.reason}".rstrip(": ")


def open_release(seq: int, fact: ReclaimRequested) -> OpenRelease:
    """The release whose generation is ``seq``."""
    return OpenRelease(seq, fact.runtime, fact.model, fact.job, fact.wanted_seq)


def reclaim_wish(seq: int, fact: ReclaimWanted) -> ReclaimWish:
    """The wish that stands at ``seq``."""
    return ReclaimWish(seq, fact.actor, fact.reason, fact.runtime, fact.model, fact.vram_mb)
