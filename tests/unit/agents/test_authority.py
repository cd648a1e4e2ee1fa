"""Device authority where several things happen at once: the agent's own code on a world in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from gpukeeper.agents.attempt import Stop
from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.memory.handoff import Made, Refused
from gpukeeper.agents.memory.release import Asker
from gpukeeper.capacity.device import Device
from gpukeeper.events import device as facts
from gpukeeper.events import job as job_facts
from gpukeeper.events import runtime as runtime_facts
from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import Releases
from gpukeeper.events.reasons import Reason
from support.virtual_time import in_virtual_time, now
from support.world import WorldCard, WorldRuntime
from support.worldchecks import Checks
from support.worldhost import HOST, Host

SIZES = {"a": 6000, "b": 6000, "small": 1000}
F = TypeVar("F", bound=Fact)


class World:
    """A host, and the rules of the property test, which hold here as well."""

    def __init__(self, *, cards: int = 1, slots: int = 2, runtimes: Sequence[dict[str, Any]]) -> None:
        made = [WorldCard(Device(id=f"g{n}", kind="gpu", name="card", slots=slots), 10_000) for n in range(cards)]
        self.host = Host(made, [runtime_of(made, name=f"r{n}", **each) for n, each in enumerate(runtimes)], now)
        self.checks = Checks(self.host)
        self.cards, self.runtimes = self.host.cards, self.host.runtimes

    async def begin(self, *, rest_s: float = 0.0) -> None:
        await self.host.begin()
        await self.checks.follow()
        await self.go_on(rest_s)

    async def go_on(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            await self.host.schedule()
            await asyncio.sleep(0.5)
        assert not self.host.broken, self.host.broken

    async def send(self, runtime: WorldRuntime, model: str, **options: Any) -> str:
        device = options.pop("device", runtime.cards[0].device.id)
        job = await self.host.submit(
            device, runtime.name, model, vram_mb=SIZES[model], residency=options.get("residency")
        )
        await self.host.schedule()
        return job

    def phase(self, job: str) -> str:
        return self.host.site.jobs[job].phase

    def of(self, kind: type[F]) -> list[F]:
        return [event.data for event in self.host.events if isinstance(event.data, kind)]


def runtime_of(
    cards: list[WorldCard], *, name: str, releases: Releases = "model", on: tuple[int, ...] = (), grace_s: float = 12.0
) -> WorldRuntime:
    config = RuntimeConfig(
        name=name,
        provider="ollama",
        url="http://x",
        container=name,
        devices=tuple(f"g{n}" for n in on),
        idle_grace_s=grace_s,
        release_timeout_s=9.0,
    )
    return WorldRuntime(config, releases, cards, SIZES)


@in_virtual_time
async def test_c37_a_runtime_lets_go_of_its_own_idle_model_for_a_job_that_waits_on_it() -> None:
    """Coming there with a job, and being denied there, is no work of the runtime: it rests on."""
    world = World(runtimes=[{}])
    (runtime,) = world.runtimes
    runtime.put("a", world.cards[0])
    await world.begin()
    job = await world.send(runtime, "b")
    await world.go_on(30)

    assert world.phase(job) == "succeeded"
    assert [(fact.runtime, fact.model) for fact in world.of(facts.Reclaimed)] == [("r0", "a")]


@in_virtual_time
async def test_a_runtime_that_just_worked_for_a_job_rests_its_whole_grace_before_it_is_asked() -> None:
    world = World(runtimes=[{"grace_s": 30.0}, {}])
    first, second = world.runtimes
    await world.begin()
    await world.send(first, "a")
    job = await world.send(second, "b")
    await world.go_on(20)
    assert world.of(facts.ReclaimRequested) == []
    await world.go_on(40)

    assert world.phase(job) == "succeeded"


@in_virtual_time
async def test_c58_a_pin_that_comes_while_the_request_is_being_stored_keeps_the_model() -> None:
    world = World(runtimes=[{"grace_s": 0.0}, {}])
    runtime = world.runtimes[0]
    runtime.put("a", world.cards[0])
    await world.begin(rest_s=6)

    def pin_when_requested(_: object) -> None:
        if isinstance(world.host.events[-1].data, facts.ReclaimRequested):
            world.host.own(
                world.host.put(runtime_facts.Pinned(host=HOST, runtime="r0", model="a", actor="mo"))  # type: ignore[arg-type]
            )

    await world.host.log.follow(pin_when_requested, after=await world.host.log.last_seq())
    await world.send(world.runtimes[1], "b")
    await world.go_on(3)

    assert "a" in runtime.sits
    assert world.of(facts.ReclaimFailed)[0].reason is Reason.PINNED


@in_virtual_time
async def test_an_owner_that_also_sits_where_something_is_loaded_is_left_alone_meanwhile() -> None:
    world = World(cards=2, runtimes=[{"releases": "all", "grace_s": 0.0}, {"on": (0,)}, {"on": (1,)}])
    both, left, right = world.runtimes
    both.put("a", world.cards[0])
    both.put("small", world.cards[1])
    right.load_s = 8.0
    await world.begin(rest_s=6)
    loading = await world.send(right, "b", device="g1")
    await world.go_on(1)
    job = await world.send(left, "b", device="g0")
    await world.go_on(4)
    assert world.checks.counts.get("release", 0) == 0
    await world.go_on(20)

    assert (world.phase(loading), world.phase(job)) == ("succeeded", "succeeded")


@in_virtual_time
async def test_a_fault_that_no_provider_should_have_ends_its_release_in_the_log() -> None:
    world = World(runtimes=[{"grace_s": 0.0}, {}])
    world.runtimes[0].put("a", world.cards[0])
    world.runtimes[0].release_mode = "break"
    await world.begin(rest_s=6)
    job = await world.send(world.runtimes[1], "b")
    await world.go_on(3)

    (failed,) = world.of(facts.ReclaimFailed)
    assert (failed.reason, failed.detail) == (Reason.INTERNAL, "r0/a: ValueError: nobody foresaw that")
    assert world.phase(job) == "failed"


@in_virtual_time
async def test_the_next_agent_ends_releases_that_were_under_way() -> None:
    world = World(runtimes=[{"grace_s": 0.0}, {}])
    world.runtimes[0].put("a", world.cards[0])
    world.runtimes[0].release_mode = "hang"
    await world.begin(rest_s=6)
    job = await world.send(world.runtimes[1], "b")
    await world.go_on(2)
    (requested,) = world.checks.open
    await world.host.agent.kill()
    world.checks.agent_is_gone()
    await world.host.new_agent()

    (failed,) = world.of(facts.ReclaimFailed)
    assert (failed.generation, failed.job) == (requested, job)
    assert world.host.site.devices["h1/g0"].releases == ()
    await world.go_on(60)
    assert world.phase(job) == "succeeded", "it let go late, and the device has shown it"


@in_virtual_time
async def test_a_job_that_fits_is_not_sent_back_for_a_later_one_that_waits_for_a_release() -> None:
    world = World(runtimes=[{"on": (0,)}, {"on": (0,)}], slots=2)
    first, second = world.runtimes
    second.put("small", world.cards[0])
    world.cards[0].held["somebody", "else"] = 2500
    first.load_s = 1.0
    await world.begin(rest_s=20)
    one = await world.send(first, "a")
    await asyncio.sleep(0.0045)
    await world.send(second, "b")
    await world.go_on(10)

    assert world.phase(one) == "succeeded"
    assert world.host.site.jobs[one].attempt == 1


@in_virtual_time
async def test_an_unload_after_a_job_leaves_what_others_keep() -> None:
    world = World(runtimes=[{"releases": "all"}])
    (runtime,) = world.runtimes
    runtime.put("small", world.cards[0])
    await world.begin()
    job = await world.send(runtime, "a", residency="unload")
    await world.go_on(10)

    assert world.phase(job) == "succeeded"
    assert sorted(runtime.sits) == ["a", "small"]


@in_virtual_time
async def test_an_unload_after_a_job_waits_for_its_turn_on_the_device() -> None:
    world = World(runtimes=[{"on": (0,)}, {"on": (0,)}], slots=2)
    first, second = world.runtimes
    second.load_s = 9.0
    await world.begin()
    await world.send(first, "small", residency="unload")
    await asyncio.sleep(2.5)
    job = await world.send(second, "a")
    await world.go_on(20)

    assert world.phase(job) == "succeeded"
    assert list(first.sits) == []


@in_virtual_time
async def test_c41_a_release_for_a_job_that_is_cancelled_while_the_request_is_stored_is_not_sent() -> None:
    world = World(runtimes=[{"grace_s": 0.0}, {}])
    world.runtimes[0].put("a", world.cards[0])
    await world.begin(rest_s=6)

    def stop_when_requested(_: object) -> None:
        if isinstance(world.host.events[-1].data, facts.ReclaimRequested):
            for attempt in world.host.agent.attempts.values():
                attempt.stop(Stop.PREEMPT)

    await world.host.log.follow(stop_when_requested, after=await world.host.log.last_seq())
    world.host.paused = False
    await world.send(world.runtimes[1], "b")
    world.host.paused = True
    await world.go_on(3)

    assert "a" in world.runtimes[0].sits
    assert [fact.reason for fact in world.of(facts.ReclaimFailed)] == [Reason.NOT_NEEDED]


@in_virtual_time
async def test_c24_an_owner_that_gives_back_too_little_is_asked_once_and_the_next_one_after_it() -> None:
    world = World(runtimes=[{"grace_s": 0.0, "on": (0,)}, {"grace_s": 0.0, "on": (0,)}, {"on": (0,)}])
    first, second, third = world.runtimes
    first.put("a", world.cards[0])
    second.put("small", world.cards[0])
    first.release_mode = "part"
    world.cards[0].held["somebody", "else"] = 1000
    await world.begin(rest_s=6)
    job = await world.send(third, "b")
    await world.go_on(20)

    assert [fact.runtime for fact in world.of(facts.ReclaimRequested)][:2] == ["r0", "r1"]
    assert world.phase(job) == "succeeded"


@in_virtual_time
async def test_c41_a_release_that_was_sent_goes_on_to_its_end_when_its_job_is_stopped() -> None:
    world = World(runtimes=[{"grace_s": 0.0}, {}])
    world.runtimes[0].put("a", world.cards[0])
    world.runtimes[0].release_mode = "late"
    await world.begin(rest_s=6)
    await world.send(world.runtimes[1], "b")
    await asyncio.sleep(1)
    world.host.paused = True
    (attempt,) = world.host.agent.attempts.values()
    attempt.stop(Stop.PREEMPT)
    await asyncio.sleep(1)
    assert world.host.agent.room.turns.taken("g0"), "while it goes on, nobody else loads there"
    await world.go_on(10)

    assert [fact.measured_mb for fact in world.of(facts.Reclaimed)] == [6000]
    assert not world.host.agent.room.turns.taken("g0")


@in_virtual_time
async def test_c57_a_release_that_the_device_does_not_show_is_none_and_blocks_the_device() -> None:
    world = World(runtimes=[{"grace_s": 0.0}, {}])
    world.runtimes[0].put("a", world.cards[0])
    world.runtimes[0].release_mode = "lie"
    await world.begin(rest_s=6)
    job = await world.send(world.runtimes[1], "b")
    await world.go_on(30)

    assert world.of(facts.Reclaimed) == []
    assert [fact.reason for fact in world.of(facts.ReclaimFailed)] == [Reason.RELEASE_FAILED]
    assert "blocked" in [fact.state for fact in world.of(facts.Changed)]
    assert world.phase(job) in ("waiting", "routed")
    world.runtimes[0].heal()
    await world.go_on(20)
    assert world.phase(job) == "succeeded"


@pytest.mark.parametrize(("epoch", "made"), [(1, False), (10**9, True)], ids=["earlier", "later"])
@in_virtual_time
async def test_room_is_made_beside_what_earlier_claims_were_promised(epoch: int, made: bool) -> None:
    world = World(runtimes=[{}])
    await world.begin()
    room, device = world.host.agent.room, world.cards[0].device
    room.ledger = room.ledger.reserve(epoch, device.id, 6000, now())
    await room.turns.take([device.id])
    found = await room.handoff.make_room(device, 6000, Asker(turn_on=(device.id,), epoch=10**6))

    assert isinstance(found, Made if made else Refused)


@in_virtual_time
async def test_what_was_loaded_since_the_reading_counts_whoever_came_first() -> None:
    world = World(runtimes=[{}])
    await world.begin()
    room, device = world.host.agent.room, world.cards[0].device
    world.cards[0].read_s = 1.0
    room.ledger = room.ledger.reserve(10**9, device.id, 6000, now())
    await room.turns.take([device.id])
    making = asyncio.create_task(room.handoff.make_room(device, 6000, Asker(turn_on=(device.id,), epoch=10**6)))
    await asyncio.sleep(0.5)
    room.ledger = room.ledger.loaded(10**9, now())

    assert isinstance(await making, Refused)


@in_virtual_time
async def test_a_wish_for_memory_waits_while_something_is_loaded_on_its_device() -> None:
    world = World(runtimes=[{"grace_s": 0.0}, {}])
    world.runtimes[0].put("small", world.cards[0])
    world.runtimes[1].load_s = 8.0
    await world.begin(rest_s=6)
    await world.send(world.runtimes[1], "b")
    await world.go_on(1)
    await world.host.put(facts.ReclaimWanted(host=HOST, device="g0", command_seq=1, actor="mo", runtime="r0"))
    await world.go_on(4)
    assert world.of(facts.ReclaimRequested) == []
    await world.go_on(10)

    assert [fact.runtime for fact in world.of(facts.Reclaimed)] == ["r0"]


@in_virtual_time
async def test_c5_a_job_that_was_admitted_before_its_device_was_blocked_loads_nothing_there() -> None:
    world = World(runtimes=[{"grace_s": 0.0, "on": (0,)}, {"on": (0,)}, {"on": (0,)}])
    owner, first, second = world.runtimes
    owner.put("a", world.cards[0])
    owner.release_mode = "stuck"
    await world.begin(rest_s=6)
    one = await world.send(first, "b")
    other = await world.send(second, "small")
    await world.go_on(14)

    assert world.of(facts.ReclaimFailed)[0].reason is Reason.HANDOFF_TIMEOUT
    waiting = {fact.job: fact.reason for fact in world.of(job_facts.Waiting)}
    assert waiting == {one: Reason.HANDOFF_TIMEOUT, other: Reason.DEVICE_BLOCKED}
    assert world.checks.counts.get("load", 0) == 0


@in_virtual_time
async def test_two_jobs_for_one_model_cost_one_load() -> None:
    world = World(runtimes=[{}])
    await world.begin()
    jobs = [await world.send(world.runtimes[0], "small") for _ in range(2)]
    await world.go_on(10)

    assert [world.phase(job) for job in jobs] == ["succeeded", "succeeded"]
    assert world.checks.counts["load"] == 1


@in_virtual_time
async def test_what_is_loaded_is_counted_once_while_its_job_still_runs() -> None:
    world = World(runtimes=[{}, {}])
    first, second = world.runtimes
    first.run_s = 60.0
    await world.begin()
    long = await world.send(first, "a")
    await world.go_on(4)
    job = await world.send(second, "small")
    await world.go_on(10)

    assert (world.phase(long), world.phase(job)) == ("running", "succeeded")


@in_virtual_time
async def test_c58_an_unload_after_a_job_leaves_a_model_that_its_runtime_keeps() -> None:
    world = World(runtimes=[{}])
    (runtime,) = world.runtimes
    runtime.put("small", world.cards[0])
    runtime.kept.add("small")
    await world.begin()
    job = await world.send(runtime, "small", residency="unload")
    await world.go_on(10)

    assert world.phase(job) == "succeeded"
    assert list(runtime.sits) == ["small"]
