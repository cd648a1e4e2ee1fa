"""`gpuq preview`: what would happen to a job, with no effect and without a job."""

from __future__ import annotations

from typing import Any

from gpukeeper.capacity.preview import Preview, preview
from gpukeeper.cli.agentstate import agent_state
from gpukeeper.cli.errors import NotFound
from gpukeeper.cli.evidence import candidates
from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.livesite import LiveSite
from gpukeeper.cli.options import Where
from gpukeeper.cli.printing import one_line, print_json, say
from gpukeeper.cli.session import open_session
from gpukeeper.events.clock import now_ns
from gpukeeper.events.reasons import Reason
from gpukeeper.projections.site import Site
from gpukeeper.scheduler.feasible import Infeasible, Want, options

#: Of what does not exist, rather than has no room.
_NOT_THERE = (Reason.UNKNOWN_HOST, Reason.UNKNOWN_RUNTIME, Reason.UNKNOWN_DEVICE)


async def show_preview(where: Where, want: Want, *, as_json: bool) -> Exit:
    """Print what would happen to a job for ``want``, place by place. Reads only.

    Raises:
        NotFound: a host, device or runtime that it names does not exist.
        LogUnavailable, WaitTimedOut: the log did not answer (in time).
    """
    async with open_session(where) as session:
        live = LiveSite(session)
        try:
            await live.start()
            possible = options(live.site, want)
            if isinstance(possible, Infeasible) and possible.reason in _NOT_THERE:
                raise NotFound(f"{possible.path} = {possible.value!r}: {possible.detail}", reason=possible.reason)
            _require_device(live.site, want)
            now = now_ns()
            found = preview(want.model, candidates(live.site, live.heard, want, now_ns=now))
            document = _document(live, found, now)
        finally:
            await live.stop()
    if as_json:
        print_json(document)
    else:
        for line in found.sentences():
            say(one_line(line, 2000))
    return Exit.OK if found.outcome in ("starts", "releases") else Exit.NO_ROOM


def _require_device(site: Site, want: Want) -> None:
    """A device that is named without its host is looked for on every host.

    Raises:
        NotFound: none has it.
    """
    hosts = [host for name, host in site.hosts.items() if want.host in (None, name)]
    known = sorted({device for host in hosts for device in host.devices})
    if want.device is not None and known and want.device not in known:
        words = f"device = {want.device!r}: no such device; known: {', '.join(known)}"
        raise NotFound(words, reason=Reason.UNKNOWN_DEVICE)


def _document(live: LiveSite, found: Preview, now: int) -> dict[str, Any]:
    hosts = {place.host for place in found.places}
    return {
        "seq": live.site.seq,
        "model": found.model,
        "outcome": found.outcome,
        "agents": {
            name: agent_state(live.site.hosts[name], live.heard.get(name), now_ns=now) for name in sorted(hosts)
        },
        "places": found.places,
        "sentences": found.sentences(),
    }
