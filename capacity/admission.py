"""May this job's model use this device now? Pure: the answer follows from the arguments alone.

    usable = measured free - reservations that the reading cannot show yet - headroom

Where the configuration limits the device (``limit_mb``), what is free below that limit counts instead.

Two things make a reading stale for a reservation: the load had not completed when the reading was taken, or the reading
is of a kind that never shows it (see :class:`Ledger`). A model that is loading may be counted twice, once as reserved
and once as far as it shows already: too careful for some seconds, never too generous.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec

from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.events.instants import parse_utc
from gpukeeper.events.readings import DeviceReading
from gpukeeper.events.reasons import Reason

_PIDS_SHOWN_MAX = 5


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """Memory promised to the claim ``epoch``."""

    epoch: int
    device: str
    mb: int
    reserved_at: datetime
    #: When the load was known to be complete: readings begun after that show it.
    loaded_at: datetime | None = None
    #: The claim is over; what it loaded may well stay resident.
    released: bool = False

    def counts_against(self, reading: DeviceReading) -> bool:
        """Whether ``reading`` does not show this reservation, so that it must be subtracted."""
        if reading.device != self.device:
            return False
        if not shows_use(reading):
            return not self.released
        return self.loaded_at is None or parse_utc(reading.read_at) <= self.loaded_at


class Ledger(msgspec.Struct, frozen=True):
    """The reservations of one agent. Every change gives a new ledger.

    A reservation is made visible by a reading begun *after* its load was complete, and counts until then, also when the
    claim was released meanwhile: a model stays resident after its job, and an older reading does not know. A release
    before the load was complete takes the reservation away, so release only once the runtime has let go.

    Readings of static devices never show use, and those of plain host memory need not (a model that is mapped from a
    file counts as available): there a reservation counts until it is released.
    """

    reservations: tuple[Reservation, ...] = ()

    def reserve(self, epoch: int, device: str, mb: int, at: datetime) -> Ledger:
        """Promise ``mb`` to ``epoch``; an earlier promise to it is replaced.

        Raises:
            ValueError: ``mb`` is negative.
        """
        if mb < 0:
            raise ValueError(f"{mb} MB cannot be reserved")
        kept = tuple(each for each in self.reservations if each.epoch != epoch)
        return Ledger((*kept, Reservation(epoch=epoch, device=device, mb=mb, reserved_at=at)))

    def loaded(self, epoch: int, at: datetime) -> Ledger:
        """The load of ``epoch`` is complete. Without a reservation of that epoch nothing changes."""
        return Ledger(
            tuple(
                msgspec.structs.replace(each, loaded_at=at) if each.epoch == epoch else each
                for each in self.reservations
            )
        )

    def release(self, epoch: int) -> Ledger:
        """The claim ``epoch`` is over. Without a reservation of that epoch nothing changes."""
        return Ledger(
            tuple(
                msgspec.structs.replace(each, released=True) if each.epoch == epoch else each
                for each in self.reservations
                if each.epoch != epoch or each.loaded_at is not None
            )
        )

    def without(self, epoch: int) -> Ledger:
        """All but what is promised to ``epoch``: what others were promised, as its holder sees it."""
        return Ledger(tuple(each for each in self.reservations if each.epoch != epoch))

    def ahead_of(self, epoch: int) -> Ledger:
        """What counts for ``epoch`` when it has its turn to load: what was loaded, and the promises before its own.

        A later claim may have been promised what only a release brings. It has its turn later, and measures then.
        """
        return Ledger(
            tuple(
                each
                for each in self.reservations
                if each.epoch != epoch and (each.loaded_at is not None or each.epoch < epoch)
            )
        )

    def seen_in(self, reading: DeviceReading, *, older_by_s: float = 0.0) -> Ledger:
        """Forget what was released and needs no counting any more, now that there is ``reading``.

        Args:
            reading: the newest.
            older_by_s: others may still decide on readings that are older than this one by so much.
        """
        since = parse_utc(reading.read_at) - timedelta(seconds=older_by_s)
        return Ledger(
            tuple(
                each
                for each in self.reservations
                if not (
                    each.released
                    and each.device == reading.device
                    and not each.counts_against(reading)
                    and (not shows_use(reading) or each.loaded_at is None or each.loaded_at < since)
                )
            )
        )

    def unseen_mb(self, reading: DeviceReading) -> int:
        """What must be subtracted from the free memory in ``reading``, in MB."""
        return sum(each.mb for each in self.reservations if each.counts_against(reading))


class HostRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What the host has left beside its devices, in MB, less what is promised already. None where nobody knows."""

    ram_mb: int | None = None
    disk_mb: int | None = None


class Admit(msgspec.Struct, frozen=True, kw_only=True):
    """The model may use the device."""

    #: What to reserve for the claim. 0 where the model is resident; all that is usable where the need is unknown.
    reserve_mb: int
    need_mb: int | None
    need_source: str
    reserved_mb: int
    headroom_mb: int
    usable_mb: int | None
    detail: str


class Deny(msgspec.Struct, frozen=True, kw_only=True):
    """The model may not use the device now."""

    reason: Reason
    detail: str
    need_mb: int | None
    need_source: str
    reserved_mb: int
    headroom_mb: int
    usable_mb: int | None
    #: Even the empty device could not hold it: waiting does not help.
    never_fits: bool = False
    #: The host's memory or disk is what is missing: no release on the device helps.
    host_short: bool = False


def shows_use(reading: DeviceReading) -> bool:
    """Whether readings of this kind show what is loaded and what is let go."""
    return reading.source in ("nvml", "amdgpu") or reading.unified


def capacity_mb(device: Device, reading: DeviceReading) -> int | None:
    """What the device holds, as measured and as limited by the configuration; None where nobody knows."""
    known = [each for each in (reading.total_mb, device.limit_mb) if each is not None]
    return min(known) if reading.total_mb is not None else None


def usable_mb(device: Device, reading: DeviceReading, reserved_mb: int) -> int | None:
    """What may be given out now; negative where more is promised than there is, None where the reading lacks it."""
    if reading.state != "healthy" or reading.free_mb is None or reading.total_mb is None:
        return None
    free_mb = reading.free_mb
    if device.limit_mb is not None:
        used_mb = reading.total_mb - reading.free_mb
        free_mb = min(free_mb, device.limit_mb - used_mb)
    return free_mb - reserved_mb - device.headroom_mb


def admit(
    *,
    device: Device,
    reading: DeviceReading,
    reserved_mb: int,
    need: Need | None,
    resident: bool,
    allow_unknown_need: bool,
    room: HostRoom | None = None,
    drained: str | None = None,
    blocked: str | None = None,
) -> Admit | Deny:
    """Decide on one reading of one device. First match wins:

    1. The device may not be scheduled at all: denied.
    2. An operator drained it: denied, a resident model too.
    3. It is lost, or blocked by an owner that did not let go: denied, a resident model too.
    4. It could not be read, or the reading lacks figures: denied, a resident model too. The model's memory is accounted
       for, but whether the device still works is not known, and the check after the load needs its reading anyway.
    5. The model is resident: admitted, it needs nothing more.
    6. It needs more of the host's memory or disk than is left there, or than anybody knows to be left: denied.
    7. Nobody knows the need: denied, unless the runtime is allowed to; then all that is usable is reserved.
    8. The need is at most what is usable: admitted. Otherwise denied.

    Args:
        device: as found or declared.
        reading: of that device, taken just before.
        reserved_mb: :meth:`Ledger.unseen_mb` of that reading, without the claim that asks.
        need: what the model takes, or None.
        resident: the runtime holds all of the model on this device already.
        allow_unknown_need: the runtime's setting.
        room: what the host has left; only asked where the need names memory or disk of the host.
        drained: who took the device out of service and why, in words; None where it is in service.
        blocked: which owner did not let go, in words; None where none is known. A reading may say so as well.

    Raises:
        ValueError: the reading is of another device, or ``reserved_mb`` or the need is negative.
    """
    if reading.device != device.id:
        raise ValueError(f"a reading of {reading.device} says nothing about {device.id}")
    asked_mb = need.vram_mb if need is not None else None
    asked = (asked_mb, need.ram_mb, need.disk_mb) if need is not None else ()
    if reserved_mb < 0 or any(each is not None and each < 0 for each in asked):
        raise ValueError("memory cannot be negative")
    source = need.source if need is not None else ""
    free_now_mb = usable_mb(device, reading, reserved_mb)

    def denied(reason: Reason, detail: str, *, never_fits: bool = False, host_short: bool = False) -> Deny:
        return Deny(
            reason=reason,
            detail=detail,
            need_mb=asked_mb,
            need_source=source,
            reserved_mb=reserved_mb,
            headroom_mb=device.headroom_mb,
            usable_mb=free_now_mb,
            never_fits=never_fits,
            host_short=host_short,
        )

    def admitted(reserve_mb: int, detail: str) -> Admit:
        return Admit(
            reserve_mb=reserve_mb,
            need_mb=asked_mb,
            need_source=source,
            reserved_mb=reserved_mb,
            headroom_mb=device.headroom_mb,
            usable_mb=free_now_mb,
            detail=detail,
        )

    label = _label(device)
    if device.unschedulable is not None:
        return denied(Reason.DEVICE_UNKNOWN, f"{label} may not be scheduled: {device.unschedulable}.")
    if drained is not None:
        return denied(Reason.DRAINED, f"{label} is out of service: {drained}.")
    if reading.state == "lost":
        return denied(Reason.DEVICE_LOST, f"{label} is lost: {reading.error or 'no further word'}.")
    if blocked is not None or reading.state == "blocked":
        return denied(Reason.DEVICE_BLOCKED, f"{label} is blocked: {blocked or reading.error or 'no further word'}.")
    if reading.state != "healthy":
        return denied(Reason.DEVICE_UNKNOWN, f"{label} is {reading.state}: {reading.error or 'no further word'}.")
    if free_now_mb is None:
        return denied(Reason.DEVICE_UNKNOWN, f"{label}: the reading of {reading.read_at} lacks memory figures.")
    if resident:
        return admitted(0, f"The model is resident on {label}: it needs nothing more.")
    for name, wanted_mb, left_mb in _of_the_host(need, room):
        if left_mb is None:
            words = f"Asked for {wanted_mb} MB of {name}; what is left is not known."
            return denied(Reason.DEVICE_UNKNOWN, words, host_short=True)
        if wanted_mb > left_mb:
            words = f"Asked for {wanted_mb} MB of {name}; {left_mb} MB are left."
            return denied(Reason.INSUFFICIENT, words, host_short=True)
    figures = _figures(device, reading, reserved_mb, free_now_mb)
    if asked_mb is None:
        if not allow_unknown_need:
            return denied(
                Reason.NEED_UNKNOWN,
                f"Nobody declared or reported how much memory the model takes on {label}; {figures}.",
            )
        if free_now_mb <= 0:
            return denied(Reason.INSUFFICIENT, f"Asked for an unknown amount on {label}; {figures}.")
        return admitted(free_now_mb, f"The need is unknown, which the runtime allows: all of {label}; {figures}.")
    words = f"Asked for {asked_mb} MB{f' ({source})' if source else ''} on {label}"
    if asked_mb <= free_now_mb:
        return admitted(asked_mb, f"{words}; {figures}.")
    capacity = capacity_mb(device, reading)
    never_fits = capacity is not None and asked_mb > capacity - device.headroom_mb
    beyond = "; it would not fit even if the device were empty" if never_fits else ""
    return denied(Reason.INSUFFICIENT, f"{words}; {figures}{beyond}.", never_fits=never_fits)


def _of_the_host(need: Need | None, room: HostRoom | None) -> list[tuple[str, int, int | None]]:
    """What is asked of the host beside its devices: its name, how much, and how much is left of it."""
    if need is None or (need.ram_mb is None and need.disk_mb is None):
        return []
    left = room or HostRoom()
    asked = (("the host's memory", need.ram_mb, left.ram_mb), ("the host's disk", need.disk_mb, left.disk_mb))
    return [(name, wanted_mb, left_mb) for name, wanted_mb, left_mb in asked if wanted_mb]


def _label(device: Device) -> str:
    return f"{device.id} ({device.name})"


def _figures(device: Device, reading: DeviceReading, reserved_mb: int, free_now_mb: int) -> str:
    limit = f" (limited to {device.limit_mb} MB)" if device.limit_mb is not None else ""
    shared = ", shared with the host" if reading.unified else ""
    return (
        f"usable {free_now_mb} MB: free {reading.free_mb} of {reading.total_mb} MB{limit}{shared}, "
        f"{reserved_mb} MB reserved by jobs not in the reading, headroom {device.headroom_mb} MB; "
        f"used {reading.used_mb} MB by {_users(reading)}"
    )


def _users(reading: DeviceReading) -> str:
    if reading.processes is None:
        return "whom the source does not say"
    if not reading.processes:
        return "no process that the driver lists"
    ranked = sorted(reading.processes, key=lambda each: (-(each.used_mb or 0), each.pid))
    shown = [
        f"pid {each.pid} ({'unknown' if each.used_mb is None else each.used_mb} MB)"
        for each in ranked[:_PIDS_SHOWN_MAX]
    ]
    more = len(ranked) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
