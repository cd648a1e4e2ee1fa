"""Which function folds which fact."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpukeeper.events import device as device_facts
from gpukeeper.events import host as host_facts
from gpukeeper.events import job as job_facts
from gpukeeper.events import operator as operator_facts
from gpukeeper.events import route as route_facts
from gpukeeper.events import runtime as runtime_facts
from gpukeeper.events import site as site_facts
from gpukeeper.events.codec import Event, Submitted, Unknown, Unreadable
from gpukeeper.projections.folding import commands, devices, hosts, jobs

if TYPE_CHECKING:
    from gpukeeper.projections.site import Site

#: Fact -> function. A fact that no projection needs is simply not here.
HANDLERS: dict[type, Callable[[Site, Event, Any], None]] = {
    Submitted: jobs.on_submitted,
    Unreadable: commands.on_unreadable,
    Unknown: commands.on_unknown,
    operator_facts.Cancel: commands.on_cancel,
    job_facts.Accepted: jobs.on_accepted,
    job_facts.Rejected: jobs.on_rejected,
    job_facts.Resubmitted: jobs.on_resubmitted,
    job_facts.Waiting: jobs.on_waiting,
    job_facts.Admitted: jobs.on_admitted,
    job_facts.Denied: jobs.on_denied,
    job_facts.PlacementVerified: jobs.on_placement_verified,
    job_facts.PlacementFailed: jobs.on_note,
    job_facts.Started: jobs.on_started,
    job_facts.Progress: jobs.on_progress,
    job_facts.CancelRequested: jobs.on_cancel_requested,
    job_facts.Succeeded: jobs.on_succeeded,
    job_facts.Failed: jobs.on_failed,
    job_facts.Cancelled: jobs.on_cancelled,
    job_facts.Preempted: jobs.on_preempted,
    job_facts.Expired: jobs.on_expired,
    job_facts.Unroutable: jobs.on_unroutable,
    job_facts.Lost: jobs.on_lost,
    job_facts.LateResult: jobs.on_note,
    route_facts.Routed: jobs.on_routed,
    route_facts.Unrouted: jobs.on_unrouted,
    device_facts.Appeared: devices.on_appeared,
    device_facts.Changed: devices.on_changed,
    device_facts.Claimed: devices.on_claimed,
    device_facts.Released: devices.on_released,
    device_facts.ClaimLapsed: devices.on_claim_lapsed,
    runtime_facts.Registered: hosts.on_registered,
    runtime_facts.HealthChanged: hosts.on_health_changed,
    runtime_facts.ModelLoaded: hosts.on_model_loaded,
    runtime_facts.Suspect: hosts.on_suspect,
    host_facts.Joined: hosts.on_joined,
    host_facts.Left: hosts.on_left,
    site_facts.LeaderElected: commands.on_leader_elected,
    site_facts.CommandRefused: commands.on_command_refused,
    operator_facts.Reclaim: commands.on_reclaim,
    operator_facts.Pin: commands.on_pin,
    operator_facts.Unpin: commands.on_pin,
    operator_facts.Drain: commands.on_drain,
    operator_facts.Resume: commands.on_drain,
    operator_facts.RuntimeAct: commands.on_runtime_act,
    device_facts.Drained: devices.on_drained,
    device_facts.Resumed: devices.on_resumed,
    device_facts.ReclaimWanted: devices.on_reclaim_wanted,
    device_facts.ReclaimRequested: devices.on_reclaim_requested,
    device_facts.HandedOff: devices.on_handed_off,
    device_facts.Reclaimed: devices.on_reclaim_end,
    device_facts.ReclaimRefused: devices.on_reclaim_end,
    device_facts.ReclaimFailed: devices.on_reclaim_end,
    runtime_facts.ModelUnloaded: hosts.on_runtime_note,
    runtime_facts.ProvisionStarted: hosts.on_runtime_note,
    runtime_facts.ProvisionProgress: hosts.on_runtime_note,
    runtime_facts.Provisioned: hosts.on_runtime_note,
    runtime_facts.ProvisionFailed: hosts.on_runtime_note,
    runtime_facts.Pinned: hosts.on_pinned,
    runtime_facts.Unpinned: hosts.on_unpinned,
    runtime_facts.ActWanted: hosts.on_act_wanted,
    runtime_facts.Acted: hosts.on_acted,
}
