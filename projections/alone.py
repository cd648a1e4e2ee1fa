"""One job folded from its own events, for those that a site has forgotten. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpukeeper.events.codec import Event
from gpukeeper.projections.job import Job
from gpukeeper.projections.site import Retention, Site

#: Longer than any log: what is folded for one look is not forgotten meanwhile.
_FOR_EVER = Retention(after_s=1e9)


def fold_alone(history: Iterable[Event], job_id: str) -> Job | None:
    """A job from the events on its subject, or None where they do not hold its beginning."""
    site = Site(_FOR_EVER)
    for event in history:
        site.apply(event)
    return site.jobs.get(job_id)
