"""Before the admission: a model that is missing is fetched, so that its need is decided on what it turns out to be.

Nothing is loaded here. The claim keeps the slot meanwhile; no turn of the device is taken, so loads and releases for
others go on beside a fetch that may take an hour.
"""

from __future__ import annotations

import asyncio

from gpukeeper.agents.body import Body
from gpukeeper.agents.endings import ClockExpired
from gpukeeper.agents.hold import Hold
from gpukeeper.agents.preparing import Evidence
from gpukeeper.capacity.admission import Deny
from gpukeeper.capacity.decision import Decision
from gpukeeper.events.reasons import Reason


def may_fetch(hold: Hold, evidence: Evidence) -> bool:
    """Whether the runtime can fetch models, and may lack the job's."""
    look = evidence.look
    if hold.room.provisioner is None or not hold.provider.pulls or not look.healthy or look.resident is None:
        return False
    return evidence.row is None and not evidence.replaces and evidence.disputed is None


def worth_fetching(decision: Decision) -> bool:
    """Whether nothing but an unknown need stands against the job: else it is refused before anything is fetched."""
    admission = decision.admission
    return not isinstance(admission, Deny) or bool(decision.releases) or admission.reason is Reason.NEED_UNKNOWN


async def fetch_missing(hold: Hold, body: Body) -> bool:
    """Return when the runtime has the job's model; whether it had to be fetched. Takes as long as a load may.

    Raises:
        RuntimeFailure: it may not be fetched, or the fetch failed.
        ClockExpired: the load clock ran out.
    """
    provisioner = hold.room.provisioner
    assert provisioner is not None, "asked only where there is one"
    clock = hold.route.clocks.load
    loop = asyncio.get_running_loop()
    began = loop.time()
    try:
        return await provisioner.ensure(hold.provider, body.model, hold.route.job, began + clock.limit_s)
    except TimeoutError:
        raise ClockExpired("load", clock, loop.time() - began) from None
