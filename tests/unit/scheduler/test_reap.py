from __future__ import annotations

from collections.abc import Mapping

import pytest

from gpukeeper.events.device import ClaimLapsed
from gpukeeper.events.job import Cancelled, Failed, Lost, Waiting
from gpukeeper.events.proposal import Proposal
from gpukeeper.events.readings import ClaimBeat, Heartbeat
from gpukeeper.events.reasons import Reason
from gpukeeper.events.route import Unrouted
from gpukeeper.projections.job import Phase
from gpukeeper.scheduler.config import SchedulerConfig
from gpukeeper.scheduler.live import Live
from gpukeeper.scheduler.reap import LAPSES_MAX, Probe, decide_lapses, decide_orphans, decide_withdrawals, suspects
from support.history import History

TTL_S = 30.0


@pytest.fixture
def h() -> History:
    """Two hosts, both heard; claims live for 30 s."""
    history = History(config=SchedulerConfig(claim_ttl_s=TTL_S))
    history.joined("h1")
    history.joined("h2")
    return history


def hears(h: History, host: str, seconds: float, *, listed: tuple[int, ...] = ()) -> None:
    """Time passes in which only ``host`` is heard, every five seconds."""
    claims = tuple(ClaimBeat(job="?", device="g0", slot=0, epoch=epoch) for epoch in listed)
    for _ in range(round(seconds / 5)):
        h.beat(host, claims=claims)
        h.silence(5)
    h.beat(host, claims=claims)


def lapses(h: History, probes: Mapping[str, Probe]) -> list[ClaimLapsed]:
    found = [proposal.fact for proposal in decide_lapses(h.site, h.live, h.config, probes)]
    assert all(isinstance(fact, ClaimLapsed) for fact in found)
    return [fact for fact in found if isinstance(fact, ClaimLapsed)]


def lapsed(h: History, probes: Mapping[str, Probe]) -> list[str]:
    """Jobs whose claims end."""
    return [fact.job for fact in lapses(h, probes)]


# --- silence


def test_a_claim_lapses_when_its_host_is_silent_for_its_time_to_live_and_does_not_answer(h: History) -> None:
    epoch = h.is_running("a", name="h1")
    h.beat("h1", claims=(ClaimBeat(job="a", device="g0", slot=0, epoch=epoch, tokens=12),))
    hears(h, "h2", 30)

    (proposal,) = decide_lapses(h.site, h.live, h.config, {"h1": "silent"})

    assert (proposal.subject, proposal.expected, proposal.epoch) == ("gpuq.ev.device.h1.g0", h.device().seq, epoch)
    fact = proposal.fact
    assert isinstance(fact, ClaimLapsed)
    assert (fact.job, fact.epoch, fact.reason, fact.silent_s) == ("a", epoch, Reason.CLAIM_LAPSED, 30.0)
    assert fact.detail == "no heartbeat for 30 s (limit 30 s), and no answer to a probe; other agents are heard"
    assert fact.last_beat is not None
    assert (fact.last_beat.tokens, fact.last_beat_at) == (12, "2025-06-15T12:00:00Z")


def test_a_claim_stands_while_its_host_was_silent_for_less(h: History) -> None:
    h.is_running("a", name="h1")
    hears(h, "h2", 25)

    assert suspects(h.site, h.live, h.config) == []
    assert lapsed(h, {"h1": "silent"}) == []
    assert lapsed(h, {"h1": "nobody"}) == []


def test_c48_a_claim_whose_agent_answers_a_probe_never_lapses(h: History) -> None:
    """Its heartbeats do not arrive, but it lives."""
    h.is_running("a", name="h1")
    hears(h, "h2", 600)

    assert lapsed(h, {"h1": "answered"}) == []


def test_a_claim_whose_agent_was_not_asked_does_not_lapse(h: History) -> None:
    h.is_running("a", name="h1")
    hears(h, "h2", 600)

    assert lapsed(h, {}) == []


def test_silence_ends_with_the_next_heartbeat(h: History) -> None:
    epoch = h.is_running("a", name="h1")
    hears(h, "h2", 29)
    hears(h, "h1", 5, listed=(epoch,))
    h.silence(25)

    assert lapsed(h, {"h1": "nobody"}) == []


def test_only_hosts_with_claims_or_routes_are_suspects() -> None:
    h = History()
    for name in ("h1", "h2", "h3"):
        h.joined(name)
    h.is_running("a", name="h1")
    h.is_routed("b", name="h2")
    h.silence(40)

    assert suspects(h.site, h.live, h.config) == ["h1", "h2"]


def test_a_host_that_was_never_heard_is_silent_from_when_its_claim_was_seen() -> None:
    """A scheduler that starts hears nothing of a host that is gone."""
    h = History()
    h.joined("h1", heard=False)
    h.is_running("a")
    h.live = Live()
    assert lapsed(h, {"h1": "nobody"}) == []

    h.silence(29)
    assert lapsed(h, {"h1": "nobody"}) == []
    h.silence(1)
    (fact,) = lapses(h, {"h1": "nobody"})
    assert (fact.last_beat, fact.last_beat_at, fact.silent_s) == (None, None, 30.0)


# --- whose silence is it?


def test_an_agent_that_the_broker_does_not_know_lapses_without_further_doubt(h: History) -> None:
    """Nobody listens on its subject, while the broker answers us."""
    h.is_running("a", name="h1")
    h.is_running("b", name="h2")
    h.silence(30)

    assert lapsed(h, {"h1": "nobody", "h2": "nobody"}) == ["a", "b"]
    assert "no agent is connected to the broker" in lapses(h, {"h1": "nobody"})[0].detail


def test_the_only_agent_is_waited_for_twice_as_long() -> None:
    h = History()
    h.joined("h1")
    h.is_running("a")
    h.silence(59)
    assert lapsed(h, {"h1": "silent"}) == []

    h.silence(1)
    (fact,) = lapses(h, {"h1": "silent"})
    assert fact.detail.endswith("no agent is heard, so it waited twice the limit")


def test_c43_when_every_agent_falls_silent_at_once_the_observer_is_suspected_first(h: History) -> None:
    h.is_running("a", name="h1")
    h.is_running("b", name="h2")
    silent: dict[str, Probe] = {"h1": "silent", "h2": "silent"}
    h.silence(59)
    assert lapsed(h, silent) == []

    h.silence(1)
    assert lapsed(h, silent) == ["a", "b"]


def test_c43_when_several_agents_fall_silent_together_the_observer_is_suspected_though_one_is_heard(
    h: History,
) -> None:
    h.joined("h3")
    h.is_running("a", name="h1")
    h.is_running("b", name="h2")
    silent: dict[str, Probe] = {"h1": "silent", "h2": "silent"}
    hears(h, "h3", 55)
    assert lapsed(h, silent) == []

    hears(h, "h3", 5)
    assert lapsed(h, silent) == ["a", "b"]
    assert "2 agents fell silent together" in lapses(h, silent)[0].detail


def test_an_agent_that_fell_silent_long_after_another_is_no_sign_that_the_observer_is_deaf(h: History) -> None:
    h.joined("h3")
    h.is_running("a", name="h1")
    for _ in range(20):
        h.beat("h1")
        hears(h, "h3", 5)
    assert h.live.host("h2").silent_s == 100
    hears(h, "h3", 30)

    assert lapsed(h, {"h1": "silent"}) == ["a"]


def test_a_host_that_left_is_not_expected_to_be_heard(h: History) -> None:
    h.joined("h3")
    h.left("h2")
    h.is_running("a", name="h1")
    hears(h, "h3", 30)

    assert lapsed(h, {"h1": "silent"}) == ["a"]


# --- time that does not count


def test_a_broker_that_is_away_adds_no_silence(h: History) -> None:
    h.is_running("a", name="h1")
    h.silence(3600, broker_healthy=False)

    assert suspects(h.site, h.live, h.config) == []
    assert lapsed(h, {"h1": "nobody"}) == []
    h.silence(29)
    assert lapsed(h, {"h1": "nobody"}) == []


def test_c43_a_pause_of_the_observer_adds_no_silence(h: History) -> None:
    """It was stopped for two minutes, or its clock jumped: all agents live, and no job is run again."""
    h.is_running("a", name="h1")
    h.silence(120, tick_s=120.0)
    h.silence(4, tick_s=4.0)

    assert h.live.host("h1").silent_s == 0
    assert lapsed(h, {"h1": "silent", "h2": "silent"}) == []
    h.silence(3, tick_s=3.0)
    assert h.live.host("h1").silent_s == 3


# --- claims that a live agent does not list


def test_a_claim_that_a_live_agent_does_not_list_lapses_after_its_time_to_live(h: History) -> None:
    epoch = h.is_running("a", name="h1")
    hears(h, "h1", 30)
    assert lapsed(h, {}) == []

    hears(h, "h1", 15)
    (fact,) = lapses(h, {})
    assert fact.epoch == epoch
    assert "has not listed the claim for" in fact.detail
    assert fact.last_beat is None


def test_a_claim_that_is_listed_does_not_lapse(h: History) -> None:
    epoch = h.is_running("a", name="h1")
    hears(h, "h1", 300, listed=(epoch,))

    assert lapsed(h, {}) == []


def test_a_claim_that_is_listed_again_is_counted_anew(h: History) -> None:
    epoch = h.is_running("a", name="h1")
    hears(h, "h1", 25)
    hears(h, "h1", 5, listed=(epoch,))
    hears(h, "h1", 25)

    assert lapsed(h, {}) == []


def test_an_agent_that_is_not_heard_says_nothing_about_what_it_does_not_list(h: History) -> None:
    h.is_running("a", name="h1")
    hears(h, "h1", 10)
    hears(h, "h2", 100)

    assert lapsed(h, {"h1": "answered"}) == []


def test_a_claim_is_not_missed_by_heartbeats_that_come_seldom(h: History) -> None:
    """An agent that beats once a minute has not spoken of a claim for up to a minute, and that is no omission."""
    h.beat("h1", interval_s=60)
    h.is_running("a", name="h1")
    h.silence(59)
    assert lapsed(h, {}) == []
    h.beat("h1", interval_s=60)
    h.silence(59)

    assert lapsed(h, {}) == []


def test_a_released_claim_leaves_nothing_behind(h: History) -> None:
    h.is_running("a", name="h1")
    hears(h, "h1", 20)
    h.succeeded("a")
    h.released("a", "h1")
    h.silence(1)

    assert h.live.host("h1").unlisted_s == {}
    assert h.live.host("h1").standing_since == {}


def test_one_claim_of_a_device_lapses_in_one_look(h: History) -> None:
    """Each rests on the device's last sequence: the second could only be refused."""
    h.appeared("h1", slots=3)
    for slot, name in enumerate("abc"):
        h.is_running(name, name="h1", slot=slot)
    hears(h, "h2", 30)

    ended: list[str] = []
    while found := decide_lapses(h.site, h.live, h.config, {"h1": "silent"}):
        assert len(found) == 1
        h.proposed(*found)
        ended += [str(proposal.correlationid) for proposal in found]
    assert ended == ["a", "b", "c"]


# --- withdrawals


def withdrawn(h: History, probes: Mapping[str, Probe] | None = None) -> dict[str, str]:
    found = [proposal.fact for proposal in decide_withdrawals(h.site, h.live, h.config, probes or {})]
    return {fact.job: fact.detail for fact in found if isinstance(fact, Unrouted)}


def test_a_route_to_an_agent_that_left_is_taken_back(h: History) -> None:
    seq = h.is_routed("a", name="h1")
    h.left("h1")
    (proposal,) = decide_withdrawals(h.site, h.live, h.config, {})

    assert (proposal.subject, proposal.expected) == ("gpuq.ev.route.h1.a", seq)
    assert proposal.fact == Unrouted(
        job="a", host="h1", route_seq=seq, reason=Reason.NO_ROUTE, detail="the agent of its host has stopped"
    )
    h.proposed(proposal)
    assert list(h.site.queue) == ["a"]
    assert withdrawn(h) == {}


@pytest.mark.parametrize("probe", ["nobody", "silent"])
def test_a_route_to_a_silent_agent_is_taken_back(h: History, probe: Probe) -> None:
    h.is_routed("a", name="h1")
    hears(h, "h2", 25)
    assert withdrawn(h, {"h1": probe}) == {}

    hears(h, "h2", 5)
    assert withdrawn(h, {"h1": probe}) == {"a": "the agent of its host is silent for 30 s"}


def test_a_route_to_an_agent_that_answers_stays(h: History) -> None:
    h.is_routed("a", name="h1")
    hears(h, "h2", 300)

    assert withdrawn(h, {"h1": "answered"}) == {}
    assert withdrawn(h) == {}


def test_a_route_that_was_claimed_is_not_taken_back(h: History) -> None:
    h.is_claimed("a", name="h1")
    h.left("h1")

    assert withdrawn(h) == {}


def test_a_route_to_what_its_host_no_longer_has_is_taken_back(h: History) -> None:
    """The agent came back with another configuration, and would leave the route where it is for ever."""
    h.is_routed("a", name="h1")
    h.is_routed("b", name="h2")
    h.joined("h1", devices=("g1",))
    h.joined("h2", runtimes=("other",))

    assert withdrawn(h) == {
        "a": "its host has no device g0 any more",
        "b": "its host lists no runtime ollama any more",
    }


# --- orphans


def orphan(h: History) -> Proposal:
    (proposal,) = decide_orphans(h.site)
    return proposal


def test_a_job_that_was_running_is_lost_with_the_evidence(h: History) -> None:
    """C27: nobody knows how it ended; it is neither a success nor silently run again."""
    epoch = h.is_running("a", name="h1")
    lapse = h.lapsed("a", "h1")
    proposal = orphan(h)

    assert (proposal.subject, proposal.expected) == ("gpuq.ev.job.a", h.job("a").seq)
    assert (proposal.epoch, proposal.causationid) == (epoch, f"e{lapse}")
    fact = proposal.fact
    assert isinstance(fact, Lost)
    assert (fact.epoch, fact.host, fact.device, fact.reason) == (epoch, "h1", "g0", Reason.OUTCOME_UNKNOWN)
    assert fact.detail == "it was running when its claim lapsed: no heartbeat for 30 s"
    assert fact.last_beat is not None
    assert (fact.last_beat.tokens, fact.last_beat_at, fact.silent_s) == (3, "2025-06-15T12:00:00Z", 30.0)
    h.proposed(proposal)
    assert decide_orphans(h.site) == []


@pytest.mark.parametrize("is_placed", [False, True])
def test_a_job_that_had_not_started_is_queued_again(h: History, is_placed: bool) -> None:
    epoch = h.is_admitted("a", name="h1")
    if is_placed:
        h.placed("a")
    h.lapsed("a", "h1")
    proposal = orphan(h)

    assert proposal.fact == Waiting(job="a", reason=Reason.CLAIM_LAPSED, detail="no heartbeat for 30 s", epoch=epoch)
    h.proposed(proposal)
    assert list(h.site.queue) == ["a"]
    assert decide_orphans(h.site) == []


def test_a_job_that_was_only_claimed_gets_its_route_taken_back(h: History) -> None:
    h.is_claimed("a", name="h1")
    h.lapsed("a", "h1")
    proposal = orphan(h)

    assert proposal.subject == "gpuq.ev.route.h1.a"
    assert isinstance(proposal.fact, Unrouted)
    assert (proposal.fact.reason, proposal.expected) == (Reason.CLAIM_LAPSED, proposal.fact.route_seq)
    h.proposed(proposal)
    assert list(h.site.queue) == ["a"]


def test_c49_a_wish_for_the_end_of_a_job_that_had_not_started_is_carried_out_without_its_agent(h: History) -> None:
    h.is_admitted("a", name="h1")
    h.cancel_requested("a", command_seq=77)
    h.lapsed("a", "h1")
    proposal = orphan(h)

    fact = proposal.fact
    assert isinstance(fact, Cancelled)
    assert (fact.actor, fact.reason, fact.command_seq) == ("op", "enough", 77)
    h.proposed(proposal)
    assert h.job("a").phase is Phase.CANCELLED


def test_a_job_that_ran_when_its_end_was_wished_for_is_lost(h: History) -> None:
    h.is_running("a", name="h1")
    h.cancel_requested("a")
    h.lapsed("a", "h1")

    assert isinstance(orphan(h).fact, Lost)


def test_c49_a_job_that_has_ended_is_no_orphan_whatever_becomes_of_its_claim(h: History) -> None:
    h.is_running("a", name="h1")
    h.succeeded("a")
    h.lapsed("a", "h1")

    assert decide_orphans(h.site) == []
    assert h.job("a").phase is Phase.SUCCEEDED


def test_a_job_admitted_under_a_claim_that_had_lapsed_is_queued_again(h: History) -> None:
    h.is_claimed("a", name="h1")
    h.lapsed("a", "h1")
    h.proposed(orphan(h))
    h.admitted("a", "h1")
    assert h.job("a").phase is Phase.ADMITTED

    h.proposed(orphan(h))

    assert list(h.site.queue) == ["a"]


@pytest.mark.parametrize("bring", ["admitted", "claimed"])
def test_a_job_whose_agent_dies_each_time_before_it_has_started_fails_in_the_end(h: History, bring: str) -> None:
    h.accepted("a")

    def lapse() -> int:
        h.routed("a")
        epoch = h.claimed("a")
        if bring == "admitted":
            h.admitted("a")
        h.lapsed("a")
        return epoch

    for _ in range(LAPSES_MAX - 1):
        lapse()
        h.proposed(orphan(h))
        assert h.job("a").phase is Phase.WAITING
    epoch = lapse()
    fact = orphan(h).fact

    assert isinstance(fact, Failed)
    assert (fact.reason, fact.epoch, fact.attempt) == (Reason.CLAIM_LAPSED, epoch, h.job("a").attempt)
    assert fact.detail == "its claim lapsed 5 times before it had started, the last time: no heartbeat for 30 s"
    assert fact.last_beat is not None
    h.proposed(orphan(h))
    assert h.job("a").phase is Phase.FAILED


def test_denials_are_no_lapses(h: History) -> None:
    h.accepted("a")
    for _ in range(LAPSES_MAX + 1):
        h.routed("a")
        h.claimed("a")
        h.denied("a")
        h.released("a")
    h.routed("a")
    h.claimed("a")
    h.admitted("a")
    h.lapsed("a")

    assert isinstance(orphan(h).fact, Waiting)


# --- purity


def test_the_same_evidence_gives_the_same_decisions_and_is_left_as_it_was(h: History) -> None:
    h.is_running("a", name="h1")
    h.joined("h3", heard=False)
    h.is_routed("b", name="h3")
    h.is_claimed("c", name="h2")
    h.lapsed("c", "h2")
    hears(h, "h2", 60)
    probes: dict[str, Probe] = {"h1": "silent", "h3": "nobody"}
    heard = repr(h.live.hosts)

    def decisions() -> list[object]:
        return [
            suspects(h.site, h.live, h.config),
            decide_lapses(h.site, h.live, h.config, probes),
            decide_withdrawals(h.site, h.live, h.config, probes),
            decide_orphans(h.site),
        ]

    assert decisions() == decisions()
    assert repr(h.live.hosts) == heard
    assert all(decisions())


def test_a_heartbeat_from_before_counts_as_life_only_where_it_is_recent_by_the_servers_clock() -> None:
    live = Live()
    for host, stored_s in (("recent", 96), ("past", 50)):
        beat = Heartbeat(host=host, boot_id="b", instance_id="i", sent_at="", interval_s=5.0)
        live.heard(beat, from_before=True, stored_ns=stored_s * 1_000_000_000)
    before = [live.is_fresh("recent"), live.is_fresh("past")]

    live.began(100 * 1_000_000_000)

    assert before == [False, False]
    assert [live.is_fresh("recent"), live.is_fresh("past")] == [True, False]
