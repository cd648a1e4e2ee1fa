"""Every fact that gpukeeper knows, by its tag. To add one: write it, list it here, run `make docs`."""

from __future__ import annotations

from gpukeeper.events import device, host, job, operator, readings, route, runtime, site
from gpukeeper.events.fact import Fact

FACTS: tuple[type[Fact], ...] = (
    operator.Cancel,
    job.Accepted,
    job.Rejected,
    job.Resubmitted,
    job.Waiting,
    job.Admitted,
    job.Denied,
    job.PlacementVerified,
    job.PlacementFailed,
    job.Started,
    job.Progress,
    job.CancelRequested,
    job.Succeeded,
    job.Failed,
    job.Cancelled,
    job.Preempted,
    job.Expired,
    job.Unroutable,
    job.Lost,
    job.LateResult,
    route.Routed,
    route.Unrouted,
    device.Appeared,
    device.Changed,
    device.Claimed,
    device.Released,
    device.ClaimLapsed,
    runtime.Registered,
    runtime.HealthChanged,
    runtime.ModelLoaded,
    runtime.Suspect,
    host.Joined,
    host.Left,
    site.LeaderElected,
    site.CommandRefused,
    readings.Heartbeat,
)

BY_TYPE: dict[str, type[Fact]] = {fact.TYPE: fact for fact in FACTS}
