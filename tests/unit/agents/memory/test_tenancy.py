"""Who uses a runtime, and since when it is proven to do nothing."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from gpukeeper.agents.memory.tenancy import Tenancy
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.owners import Tenant, owners_on
from gpukeeper.capacity.reclaim import plan
from gpukeeper.events.instants import utc_text
from gpukeeper.events.readings import Activity, ResidentModel, RuntimeReading
from gpukeeper.events.reasons import Reason
from support.scripted import MB, Card, Runtime
from support.virtual_time import in_virtual_time

GRACE_S = 300.0


class Host:
    """One Ollama with a resident model of 5,000 MB, on a clock that a test moves."""

    def __init__(self) -> None:
        self.at = datetime(2025, 6, 15, 12, tzinfo=UTC)
        self.tenancy = Tenancy(now=lambda: self.at)
        self.runtime = Runtime(Card(Device(id="g0", kind="gpu", name="card")), devices=("g0",))
        self.tenancy.register(self.runtime, grace_s=GRACE_S, gap_max_s=15)
        self.models = ["m"]
        #: Whether it says that it keeps them for ever.
        self.row_pinned = False

    def look(self, activity: Activity = "idle", *, began: datetime | None = None) -> RuntimeReading:
        rows = tuple(
            ResidentModel(model=each, size_bytes=5000 * MB, vram_bytes=5000 * MB, pinned=self.row_pinned)
            for each in self.models
        )
        read_at = utc_text(began or self.at)
        return self.tenancy.looked(
            RuntimeReading(runtime="ollama", read_at=read_at, healthy=True, activity=activity, resident=rows)
        )

    def rest(self, seconds: float) -> None:
        """Be looked at every second for so long, and be idle each time."""
        self.look()
        until = self.at + timedelta(seconds=seconds)
        while self.at < until:
            self.at += min(timedelta(seconds=1), until - self.at)
            self.look()

    def tenant(self, *, but: int | None = None) -> Tenant:
        (tenant,) = self.tenancy.tenants(("g0",), {}, but=but)
        return tenant

    def kept(self, *, but: int | None = None) -> Reason | None:
        """Why the model stays for whoever asks; None where it may go."""
        (considered,) = plan(None, owners_on("g0", (self.tenant(but=but),))).considered
        return considered.kept


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.mark.parametrize(("rested_s", "kept"), [(299, Reason.IN_GRACE), (299.999, Reason.IN_GRACE), (301, None)])
def test_a_model_may_go_after_its_grace_and_not_before(host: Host, rested_s: float, kept: Reason | None) -> None:
    host.rest(rested_s)

    assert host.kept() == kept


def test_the_grace_counts_for_the_job_that_asks_though_it_stands_at_that_runtime_itself(host: Host) -> None:
    host.rest(301)
    host.tenancy.enter("ollama", 7)
    host.look()

    assert host.kept(but=7) is None
    assert host.kept() is Reason.OWNER_BUSY
    assert host.kept(but=8) is Reason.OWNER_BUSY


def test_a_job_that_is_refused_before_it_touched_the_runtime_does_not_begin_the_grace_anew(host: Host) -> None:
    """Asked again every minute, no job would ever see the end of a grace of five."""
    host.rest(200)
    host.tenancy.enter("ollama", 7)
    host.look()
    host.tenancy.leave("ollama", 7)
    host.rest(101)

    assert host.kept() is None


@pytest.mark.parametrize("how", ["run", "load"])
def test_work_of_ours_begins_the_grace_anew_at_its_end(host: Host, how: str) -> None:
    host.rest(301)
    host.tenancy.enter("ollama", 7)
    if how == "run":
        host.tenancy.use("ollama", 7)
    else:
        host.tenancy.loading("ollama", +1)
    assert host.tenancy.working("ollama") == 1
    assert host.kept(but=7) is not None
    host.rest(10)
    if how == "load":
        host.tenancy.loading("ollama", -1)
    host.tenancy.leave("ollama", 7)
    assert host.kept() is Reason.ACTIVITY_UNKNOWN
    host.at += timedelta(seconds=1)
    host.rest(299)
    assert host.kept() is Reason.IN_GRACE
    host.rest(2)
    assert host.kept() is None


def test_between_a_load_and_the_first_request_the_runtime_is_not_idle(host: Host) -> None:
    host.rest(301)
    host.tenancy.enter("ollama", 7)
    host.tenancy.use("ollama", 7)
    host.tenancy.loading("ollama", +1)
    host.tenancy.loading("ollama", -1)
    host.rest(400)

    assert host.kept() is Reason.OWNER_BUSY
    assert host.tenant().idle_s is None


def test_a_look_that_began_before_work_of_ours_ended_proves_nothing(host: Host) -> None:
    began = host.at
    host.at += timedelta(seconds=5)
    host.tenancy.enter("ollama", 7)
    host.tenancy.use("ollama", 7)
    host.tenancy.leave("ollama", 7)
    host.look(began=began)

    assert host.tenant().idle_s is None


def test_an_older_look_that_comes_late_is_no_news(host: Host) -> None:
    host.rest(301)
    newest = host.tenancy.reading("ollama")
    host.models = []

    assert host.look(began=host.at - timedelta(seconds=3)) == newest
    assert host.kept() is None
    assert host.tenant().idle_s == 301


@pytest.mark.parametrize("activity", ["busy", "unknown"])
def test_an_older_look_that_comes_late_and_shows_no_rest_ends_it(host: Host, activity: Activity) -> None:
    host.rest(301)
    newest = host.tenancy.reading("ollama")
    host.look(activity, began=host.at - timedelta(seconds=3))

    known = host.tenancy.reading("ollama")
    assert newest is not None
    assert known is not None
    assert (known.read_at, known.idle_since) == (newest.read_at, None)
    assert host.tenant().idle_s is None
    host.at += timedelta(seconds=1)
    host.rest(299)
    assert host.kept() is Reason.IN_GRACE


def test_one_look_that_cannot_tell_ends_the_proof(host: Host) -> None:
    host.rest(301)
    host.look("unknown")
    assert host.kept() is Reason.ACTIVITY_UNKNOWN
    host.at += timedelta(seconds=1)
    host.rest(299)

    assert host.kept() is Reason.IN_GRACE


@in_virtual_time
async def test_who_comes_waits_until_the_last_of_several_releases_has_settled() -> None:
    host = Host()
    tenancy = host.tenancy
    tenancy.begin_release("ollama", "m")
    tenancy.begin_release("ollama", "n")
    waiting = asyncio.create_task(tenancy.until_settled("ollama"))
    tenancy.end_release("ollama")
    await asyncio.sleep(1)
    assert tenancy.is_releasing("ollama")
    assert not waiting.done()
    tenancy.end_release("ollama")
    await asyncio.wait_for(waiting, 1)

    assert not tenancy.is_releasing("ollama")


def test_what_was_seen_before_a_release_ended_may_be_gone(host: Host) -> None:
    tenancy, asked_at = host.tenancy, host.at
    assert not tenancy.released_since("ollama", asked_at)
    host.at += timedelta(seconds=1)
    tenancy.begin_release("ollama", "m")
    assert tenancy.released_since("ollama", asked_at)
    host.at += timedelta(seconds=1)
    tenancy.end_release("ollama")

    assert tenancy.released_since("ollama", asked_at)
    assert not tenancy.released_since("ollama", host.at + timedelta(seconds=1))


def test_a_model_that_was_asked_to_go_is_expected_to_be_missing_until_it_is(host: Host) -> None:
    host.look()
    host.tenancy.begin_release("ollama", "m:latest")
    host.look()
    assert host.tenancy.let_go("ollama") == {"m"}
    host.models = []
    host.look()

    assert host.tenancy.let_go("ollama") == frozenset()


def test_a_model_that_stayed_though_asked_is_looked_at_as_any_other(host: Host) -> None:
    host.tenancy.begin_release("ollama", "m")
    host.tenancy.stays("ollama", "m")

    assert host.tenancy.let_go("ollama") == frozenset()


# --- what a look that leaves a model out proves


def test_a_model_that_was_listed_at_the_last_look_is_expected_under_whichever_of_its_names(host: Host) -> None:
    assert host.tenancy.expects(host.runtime, "m") is None
    look = host.look()

    assert host.tenancy.expects(host.runtime, "m:latest") == look
    assert host.tenancy.expects(host.runtime, "other") is None


@pytest.mark.parametrize("change", ["load", "release"])
def test_nothing_is_expected_from_before_our_last_load_or_release(host: Host, change: str) -> None:
    """It may have pushed out whatever was idle."""
    host.look()
    host.at += timedelta(seconds=1)
    if change == "load":
        host.tenancy.loading("ollama", +1)
        host.tenancy.loading("ollama", -1)
    else:
        host.tenancy.begin_release("ollama", None)
        host.tenancy.end_release("ollama")

    assert host.tenancy.expects(host.runtime, "m") is None
    host.at += timedelta(seconds=1)
    assert host.look() == host.tenancy.expects(host.runtime, "m")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"expires_at": "2025-06-15T12:00:01Z"}, True),
        ({"expires_at": "2025-06-15T12:00:00Z"}, False),
        ({"expires_at": "no time"}, True),
        ({"expires_at": "2025-06-15T12:00:01Z", "stopping": True}, False),
    ],
)
def test_a_stay_that_is_over_is_expected_no_more(host: Host, row: dict[str, object], *, expected: bool) -> None:
    reading = host.look()
    assert reading.resident is not None
    rows = tuple(replace(each, **row) for each in reading.resident)
    host.tenancy.looked(replace(reading, resident=rows))

    assert (host.tenancy.expects(host.runtime, "m") is not None) is expected


def test_a_model_that_we_told_it_to_keep_for_ever_is_pinned_by_the_log_alone(host: Host) -> None:
    """C58: an Ollama shows what a pinned run asked for until another run asks for less, also once it is unpinned."""
    host.row_pinned = True
    host.look()
    assert host.kept() is Reason.PINNED
    host.tenancy.kept("ollama", "m:latest")
    host.rest(301)
    assert host.kept() is None

    host.models = []
    host.look()
    host.models = ["m"]
    host.rest(301)
    assert host.kept() is Reason.PINNED
