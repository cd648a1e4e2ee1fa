"""The one decision about a job's memory on one device: it fits, it fits after releases, or it does not. Pure.

The scheduler's estimate, the agent's live decision and the preview differ only in the readings that they give.
"""

from __future__ import annotations

import msgspec

from gpukeeper.capacity.admission import Admit, Deny, HostRoom, admit, shows_use
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.capacity.reclaim import Owner, Plan, plan
from gpukeeper.events.readings import DeviceReading
from gpukeeper.events.reasons import Reason


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """All that the decision rests on; the fields are those of :func:`gpukeeper.capacity.admission.admit`."""

    device: Device
    reading: DeviceReading
    reserved_mb: int = 0
    need: Need | None = None
    resident: bool = False
    allow_unknown_need: bool = False
    room: HostRoom | None = None
    drained: str | None = None
    blocked: str | None = None
    #: All owners of memory on the device (:func:`gpukeeper.capacity.owners.owners_on`), read together with it.
    owners: tuple[Owner, ...] = ()


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided."""

    admission: Admit | Deny
    #: What is missing on the device; None where releases could not help.
    shortfall_mb: int | None = None
    #: Who would be asked to let go, and why the others stay; None where releases could not help.
    plan: Plan | None = None

    @property
    def releases(self) -> tuple[Owner, ...]:
        """Whom to ask before the device is read and this is decided again; empty where it fits, or cannot."""
        return () if self.plan is None else self.plan.chosen


def decide(question: Question) -> Decision:
    """Decide on one reading. Releases are looked at only where the device's memory is all that is missing.

    Raises:
        ValueError: as :func:`~gpukeeper.capacity.admission.admit` and :func:`~gpukeeper.capacity.reclaim.plan`.
    """
    admission = admit(
        device=question.device,
        reading=question.reading,
        reserved_mb=question.reserved_mb,
        need=question.need,
        resident=question.resident,
        allow_unknown_need=question.allow_unknown_need,
        room=question.room,
        drained=question.drained,
        blocked=question.blocked,
    )
    shortfall_mb = _shortfall_mb(question.reading, admission)
    if shortfall_mb is None:
        return Decision(admission=admission)
    return Decision(admission=admission, shortfall_mb=shortfall_mb, plan=plan(shortfall_mb, question.owners))


def _shortfall_mb(reading: DeviceReading, admission: Admit | Deny) -> int | None:
    """What is missing on the device, where releases could bring it and its readings would show that they did."""
    if isinstance(admission, Admit) or admission.reason is not Reason.INSUFFICIENT:
        return None
    if admission.never_fits or admission.host_short or not shows_use(reading):
        return None
    if admission.need_mb is None or admission.usable_mb is None:
        return None
    return admission.need_mb - admission.usable_mb
