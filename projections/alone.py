"""One job folded from its own events, for those that a site has forgotten. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpukeeper.events.codec import Event
from gpukeeper.events.job import Accepted, Rejected
from gpukeeper.projections.job import Job
from gpukeeper.projections.site import Retention, Site
from gpukeeper.projections.unanswered import Waiting

#: Longer than any log: what is folded for one look is not forgotten meanwhile.
_FOR_EVER = Retention(after_s=1e9)


def fold_alone(history: Iterable[Event], job_id: str) -> Job | None:
    """A job from the events on its subject, or None where they do not hold its beginning."""
    site = Site(_FOR_EVER)
    for event in history:
        fact = event.data
        if isinstance(fact, Accepted | Rejected) and not site.jobs:
            # Its submission stands on another subject; an answer counts only where there is one to answer.
            submission = Waiting(fact.submission_seq, event.stored.stored_ns, fact.producer, b"")
            site.submissions[fact.submission_seq] = submission
        site.apply(event)
    return site.jobs.get(job_id)
