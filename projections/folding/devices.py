"""What facts about devices and claims do to the site."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpukeeper.events import device as device_facts
from gpukeeper.events.codec import Event
from gpukeeper.projections.device import Claim, Lapse, device_key, open_release, reclaim_wish, why_drained
from gpukeeper.projections.job import Phase

if TYPE_CHECKING:
    from gpukeeper.projections.site import Site


def on_appeared(site: Site, event: Event, fact: device_facts.Appeared) -> None:
    site.change_device(
        event,
        fact.host,
        fact.device,
        kind=fact.kind,
        name=fact.name,
        slots=fact.slots,
        total_mb=fact.total_mb,
        headroom_mb=fact.headroom_mb,
        unschedulable=fact.unschedulable,
        parent=fact.parent,
        state="healthy",
        detail="",
    )


def on_changed(site: Site, event: Event, fact: device_facts.Changed) -> None:
    site.change_device(event, fact.host, fact.device, state=fact.state, detail=fact.detail)


def on_claimed(site: Site, event: Event, fact: device_facts.Claimed) -> None:
    claim = Claim(
        epoch=event.seq,
        job=fact.job,
        attempt=fact.attempt,
        slot=fact.slot,
        route_seq=fact.route_seq,
        boot_id=fact.boot_id,
        instance_id=fact.instance_id,
        claimed_ns=event.stored.stored_ns,
    )
    old = site.devices.get(device_key(fact.host, fact.device))
    claims = () if old is None else old.claims
    site.change_device(event, fact.host, fact.device, claims=(*claims, claim))
    job = site.jobs.get(fact.job)
    if job is not None and job.route is not None and (job.route.seq, job.route.host) == (fact.route_seq, fact.host):
        site.unlist(job, fact.device)


def on_released(site: Site, event: Event, fact: device_facts.Released) -> None:
    claim = _drop_claim(site, event, fact.host, fact.device, fact.epoch)
    detail = "its agent gave the slot up"
    _orphan(site, claim, Lapse(fact.host, fact.device, fact.epoch, event.seq, event.event_id, detail))


def on_claim_lapsed(site: Site, event: Event, fact: device_facts.ClaimLapsed) -> None:
    claim = _drop_claim(site, event, fact.host, fact.device, fact.epoch)
    lapse = Lapse(
        host=fact.host,
        device=fact.device,
        epoch=fact.epoch,
        seq=event.seq,
        event_id=event.event_id,
        detail=fact.detail,
        last_beat=fact.last_beat,
        last_beat_at=fact.last_beat_at,
        silent_s=fact.silent_s,
    )
    _orphan(site, claim, lapse)


def on_drained(site: Site, event: Event, fact: device_facts.Drained) -> None:
    site.commands.pop(fact.command_seq, None)
    site.change_device(event, fact.host, fact.device, drained=why_drained(fact))


def on_resumed(site: Site, event: Event, fact: device_facts.Resumed) -> None:
    site.commands.pop(fact.command_seq, None)
    site.change_device(event, fact.host, fact.device, drained=None)


def on_reclaim_wanted(site: Site, event: Event, fact: device_facts.ReclaimWanted) -> None:
    site.commands.pop(fact.command_seq, None)
    old = site.devices.get(device_key(fact.host, fact.device))
    wishes = () if old is None else old.wishes
    site.change_device(event, fact.host, fact.device, wishes=(*wishes, reclaim_wish(event.seq, fact)))


def on_reclaim_requested(site: Site, event: Event, fact: device_facts.ReclaimRequested) -> None:
    old = site.devices.get(device_key(fact.host, fact.device))
    releases = () if old is None else old.releases
    site.change_device(event, fact.host, fact.device, releases=(*releases, open_release(event.seq, fact)))


def on_handed_off(site: Site, event: Event, fact: device_facts.HandedOff) -> None:
    site.change_device(event, fact.host, fact.device)


def on_reclaim_end(
    site: Site,
    event: Event,
    fact: device_facts.Reclaimed | device_facts.ReclaimRefused | device_facts.ReclaimFailed,
) -> None:
    old = site.devices.get(device_key(fact.host, fact.device))
    wishes, releases = ((), ()) if old is None else (old.wishes, old.releases)
    if isinstance(fact, device_facts.ReclaimRefused) or not fact.more:
        wishes = tuple(wish for wish in wishes if wish.seq != fact.wanted_seq)
    if not isinstance(fact, device_facts.ReclaimRefused):
        releases = tuple(each for each in releases if each.seq != fact.generation)
    site.change_device(event, fact.host, fact.device, wishes=wishes, releases=releases)


def _drop_claim(site: Site, event: Event, host: str, device_id: str, epoch: int) -> Claim | None:
    old = site.devices.get(device_key(host, device_id))
    claims = () if old is None else tuple(c for c in old.claims if c.epoch != epoch)
    site.change_device(event, host, device_id, claims=claims)
    return None if old is None else old.claim(epoch)


def _orphan(site: Site, claim: Claim | None, lapse: Lapse) -> None:
    """Note that a job lost the claim it lives under; the scheduler ends it or queues it again."""
    job = None if claim is None else site.jobs.get(claim.job)
    if claim is None or job is None or job.ended or job.phase is Phase.WAITING:
        return
    if job.phase is Phase.ROUTED:
        lives_under_it = job.route is not None and job.route.seq == claim.route_seq
    else:
        lives_under_it = job.epoch == claim.epoch
    if lives_under_it:
        site.lapses[job.id] = lapse
        # Of several devices, some may not have been claimed yet: none will be under this route.
        site.unlist(job)
