"""The farewell of an agent that another has replaced comes late, and says nothing about the other."""

from __future__ import annotations

from gpukeeper.events import subjects
from gpukeeper.events.codec import Event, decode, encode
from gpukeeper.events.fact import Fact
from gpukeeper.events.host import Joined, Left
from gpukeeper.events.log import Stored
from gpukeeper.projections.hostview import HostView
from gpukeeper.projections.site import Site


def stored(seq: int, fact: Fact) -> Event:
    body = encode(fact, event_id=f"e{seq}", source="/tests", subject="box", time="2025-10-19T14:00:00Z")
    return decode(Stored(seq, seq, subjects.host("box"), body))


def joined(instance_id: str) -> Joined:
    return Joined(host="box", boot_id="b", instance_id=instance_id, version="1", pid=1, devices=(), runtimes=())


def after(*facts: Fact) -> tuple[bool, str, str]:
    """Whether the host is left, and who speaks for it: for the site, and for the host's own view."""
    site, view = Site(), HostView("box")
    for seq, fact in enumerate(facts, 1):
        site.apply(stored(seq, fact))
        view.apply(stored(seq, fact))
    assert view.host_seq == len(facts)
    return site.hosts["box"].left, site.hosts["box"].instance_id, view.instance_id


def test_the_agent_that_speaks_for_a_host_leaves_it() -> None:
    assert after(joined("first"), Left(host="box", instance_id="first")) == (True, "first", "first")


def test_a_late_farewell_of_its_predecessor_does_not_take_a_host_away() -> None:
    facts = (joined("first"), joined("second"), Left(host="box", instance_id="first"))

    assert after(*facts) == (False, "second", "second")


def test_an_agent_that_comes_again_speaks_for_the_host() -> None:
    facts = (joined("first"), Left(host="box", instance_id="first"), joined("second"))

    assert after(*facts) == (False, "second", "second")
