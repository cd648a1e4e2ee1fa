"""Jobs that take several GPUs of one host at once."""

from __future__ import annotations

import pytest

from gpukeeper.events.job import Accepted, Rejected
from gpukeeper.events.reasons import Reason
from gpukeeper.events.route import Routed
from gpukeeper.projections.site import Site
from gpukeeper.projections.snapshot import encode_state
from gpukeeper.scheduler.accept import decide_submissions
from gpukeeper.scheduler.reap import decide_withdrawals
from gpukeeper.scheduler.route import decide_routes
from support.history import History


@pytest.fixture
def h() -> History:
    """One host with three cards of one slot each."""
    history = History()
    history.joined(devices=("g0", "g1", "g2"))
    return history


def routed(h: History) -> list[Routed]:
    found = [proposal.fact for proposal in decide_routes(h.site, h.live, h.config, h.now_s)]
    return [fact for fact in found if isinstance(fact, Routed)]


def submitted(h: History, **fields: object) -> Accepted | Rejected:
    h.submitted(**fields)  # pyright: ignore[reportArgumentType]
    (proposal,) = decide_submissions(h.site, h.live, h.config, {})
    assert isinstance(proposal.fact, Accepted | Rejected)
    return proposal.fact


def test_a_job_is_sent_to_as_many_devices_as_it_takes_in_one_fixed_order(h: History) -> None:
    h.accepted("a", gpus=2)

    (fact,) = routed(h)

    assert (fact.device, fact.more_devices) == ("g0", ("g1",))


def test_a_device_that_is_in_use_is_passed_over_for_one_that_is_free(h: History) -> None:
    h.is_running("other")
    h.accepted("a", gpus=2)

    (fact,) = routed(h)

    assert (fact.device, fact.more_devices) == ("g1", ("g2",))


def test_a_job_waits_while_too_few_of_its_devices_are_free_and_lets_others_pass(h: History) -> None:
    h.is_running("other")
    h.accepted("a", gpus=3)
    h.accepted("b")

    assert [fact.job for fact in routed(h)] == ["b"]


def test_the_slots_of_all_its_devices_are_promised_until_each_is_claimed(h: History) -> None:
    h.accepted("a", gpus=2)
    (fact,) = routed(h)
    seq = h.fact(fact)
    h.claimed("a", route_seq=seq)
    h.accepted("b", gpus=2)

    assert routed(h) == []
    assert list(h.site.routed["h1/g1"]) == ["a"]
    assert not h.site.routed["h1/g0"]


def test_a_restored_site_promises_the_same_slots(h: History) -> None:
    h.accepted("a", gpus=2)
    (fact,) = routed(h)
    seq = h.fact(fact)
    h.claimed("a", route_seq=seq)

    restored = Site.restore(h.site.state())

    assert encode_state(restored) == encode_state(h.site)
    free = {device.id: restored.free_slots(device) for device in restored.devices.values()}
    assert free == {"g0": 0, "g1": 0, "g2": 1}


def test_a_claim_that_is_given_back_takes_the_promise_of_the_other_devices_with_it(h: History) -> None:
    """The route is over: a site that was folded whole and one that was restored offer the same slots."""
    h.accepted("a", gpus=2)
    (fact,) = routed(h)
    seq = h.fact(fact)
    epoch = h.claimed("a", route_seq=seq)
    h.released("a", epoch=epoch)

    restored = Site.restore(h.site.state())

    for site in (h.site, restored):
        assert {device.id: site.free_slots(device) for device in site.devices.values()} == {"g0": 1, "g1": 1, "g2": 1}


def test_a_route_over_several_devices_is_withdrawn_once(h: History) -> None:
    h.accepted("a", gpus=2)
    (fact,) = routed(h)
    h.fact(fact)
    h.left()

    assert len(decide_withdrawals(h.site, h.live, h.config, {})) == 1


def test_more_devices_than_any_host_has_are_refused_at_submission_with_the_most_there_are(h: History) -> None:
    refused = submitted(h, need={"gpus": 4})

    assert isinstance(refused, Rejected)
    assert refused.reason == Reason.NEED_EXCEEDS_DEVICES
    (problem,) = refused.problems
    assert (problem.path, problem.value) == ("need.gpus", "4")
    assert "the most are 3" in problem.message


@pytest.mark.parametrize(
    ("fields", "path"),
    [({"host": "h1", "device": "g0"}, "device"), ({"place": "cpu"}, "place")],
    ids=["a named device", "the cpu"],
)
def test_several_gpus_and_what_contradicts_them_are_refused(h: History, fields: dict[str, object], path: str) -> None:
    refused = submitted(h, need={"gpus": 2}, **fields)

    assert isinstance(refused, Rejected)
    assert [problem.path for problem in refused.problems] == [path]


def test_a_job_of_one_gpu_says_nothing_of_further_ones(h: History) -> None:
    accepted = submitted(h)

    assert isinstance(accepted, Accepted)
    assert accepted.gpus == 1
