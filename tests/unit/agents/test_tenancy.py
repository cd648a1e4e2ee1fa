"""Who uses a runtime and since when it rests, where looks and work overlap."""

from __future__ import annotations

from datetime import timedelta

import pytest

from gpukeeper.agents.memory.tenancy import Tenancy
from gpukeeper.capacity.device import Device
from gpukeeper.events.instants import parse_utc, utc_text
from gpukeeper.events.readings import Activity, RuntimeReading
from support.scripted import Card, Runtime

START = parse_utc("2025-06-01T12:00:00Z")
NAME = "ollama"


class Clocked:
    """A tenancy with one runtime, and a clock that a test sets."""

    def __init__(self) -> None:
        self.s = 0.0
        self.tenancy = Tenancy(now=lambda: START + timedelta(seconds=self.s))
        provider = Runtime(Card(Device(id="g0", kind="gpu", name="card")))
        self.tenancy.register(provider, grace_s=10.0, gap_max_s=15.0)

    def look(self, begun_s: float, activity: Activity = "idle", *, healthy: bool = True) -> RuntimeReading:
        """A look that began then and is there now."""
        read_at = utc_text(START + timedelta(seconds=begun_s))
        return self.tenancy.looked(
            RuntimeReading(runtime=NAME, read_at=read_at, healthy=healthy, activity=activity, resident=())
        )

    @property
    def idle_s(self) -> float | None:
        (tenant,) = self.tenancy.tenants(["g0"], {})
        return tenant.idle_s


@pytest.fixture
def it() -> Clocked:
    clocked = Clocked()
    for second in (0, 5, 10):
        clocked.s = second
        clocked.look(second)
    assert clocked.idle_s == 10
    return clocked


def test_a_claim_that_comes_and_goes_without_work_leaves_the_runtime_at_rest(it: Clocked) -> None:
    it.tenancy.enter(NAME, 7)
    it.tenancy.leave(NAME, 7)

    assert it.idle_s == 10


def test_work_ends_the_rest_when_it_begins(it: Clocked) -> None:
    it.tenancy.enter(NAME, 7)
    it.tenancy.work(NAME, 7)

    assert it.idle_s is None


@pytest.mark.parametrize("how", ["run", "load"])
def test_a_look_that_began_before_our_work_ended_proves_no_rest(it: Clocked, how: str) -> None:
    """Also of a runtime that does not show that it works, and where the look is there only after the end."""
    it.s = 11
    if how == "run":
        it.tenancy.enter(NAME, 7)
        it.tenancy.work(NAME, 7)
    else:
        it.tenancy.loading(NAME, +1)
    it.s = 13
    if how == "run":
        it.tenancy.leave(NAME, 7)
    else:
        it.tenancy.loading(NAME, -1)
    it.s = 14
    it.look(12)
    assert it.idle_s is None

    it.look(14)
    assert it.idle_s == 0


def test_a_look_during_our_work_proves_no_rest(it: Clocked) -> None:
    it.tenancy.loading(NAME, +1)
    it.s = 12
    it.look(12)

    assert it.idle_s is None


def test_an_older_look_that_comes_late_is_no_news(it: Clocked) -> None:
    newest = it.tenancy.reading(NAME)
    assert it.look(7) == newest

    assert it.idle_s == 10


@pytest.mark.parametrize(("activity", "healthy"), [("busy", True), ("unknown", True), ("idle", False)])
def test_an_older_look_that_comes_late_and_shows_no_rest_ends_it(
    it: Clocked, activity: Activity, healthy: bool
) -> None:
    newest = it.tenancy.reading(NAME)
    assert newest is not None
    it.look(7, activity, healthy=healthy)

    known = it.tenancy.reading(NAME)
    assert it.idle_s is None
    assert known is not None
    assert (known.read_at, known.idle_since) == (newest.read_at, None)


async def test_a_runtime_has_settled_when_the_last_of_its_releases_has_ended(it: Clocked) -> None:
    it.tenancy.releasing(NAME, going=True)
    it.tenancy.releasing(NAME, going=True)
    it.tenancy.releasing(NAME, going=False)
    assert it.tenancy.is_releasing(NAME)

    it.tenancy.releasing(NAME, going=False)
    await it.tenancy.until_settled(NAME)
    assert not it.tenancy.is_releasing(NAME)


def test_what_was_seen_before_a_release_ended_may_be_gone(it: Clocked) -> None:
    asked_at = START + timedelta(seconds=10.5)
    assert not it.tenancy.released_since(NAME, asked_at)
    it.s = 11
    it.tenancy.releasing(NAME, going=True)
    assert it.tenancy.released_since(NAME, asked_at)
    it.s = 12
    it.tenancy.releasing(NAME, going=False)

    assert it.tenancy.released_since(NAME, asked_at)
    assert not it.tenancy.released_since(NAME, START + timedelta(seconds=12.5))
