from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any, TypeVar

import pytest

from gpukeeper.agents.config import AgentConfig
from gpukeeper.agents.room import HostRoom
from gpukeeper.agents.surveyor import Surveyor
from gpukeeper.events import device, runtime, subjects
from gpukeeper.events.codec import decode
from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import Activity, ClaimBeat, Heartbeat
from gpukeeper.projections.host import Suspicion
from support.bench import Bench, WatchedLog
from support.scripted import Runtime
from support.virtual_time import in_virtual_time

F = TypeVar("F", bound=Fact)
CLAIM = ClaimBeat(job="a", device="g0", slot=0, epoch=7, phase="running")


class Survey(Bench):
    """A bench with somebody who looks."""

    def __init__(self, *, heartbeat_s: float = 5.0, kind: str = "gpu", **device: Any) -> None:
        super().__init__(kind=kind, **device)
        self.beats_log = WatchedLog()
        self.claims: list[ClaimBeat] = []
        config = AgentConfig(host="h1", heartbeat_s=heartbeat_s)
        providers = {"ollama": self.runtime}
        self.surveyor = Surveyor(self.room, config, self.beats_log, providers, lambda: self.claims)

    async def last_of(self, kind: type[F]) -> F:
        found: list[Fact] = [
            *await self.facts(subjects.device("h1", "g0")),
            *await self.facts(subjects.runtime("h1", "ollama")),
        ]
        return [fact for fact in found if isinstance(fact, kind)][-1]

    async def beats(self) -> list[tuple[float, Heartbeat]]:
        found: list[tuple[float, Heartbeat]] = []
        for stored in await self.beats_log.read(subjects.beat("h1")):
            beat = decode(stored).data
            assert isinstance(beat, Heartbeat)
            found.append((stored.stored_ns / 1e9, beat))
        return found

    async def over(self, seconds: float) -> None:
        """Let the surveyor work for a while."""
        task = asyncio.create_task(self.surveyor.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- what is announced


@in_virtual_time
async def test_an_agent_announces_its_devices_and_its_registry() -> None:
    bench = Survey(slots=2, headroom_mb=500, limit_mb=20_000)
    await bench.surveyor.announce()

    appeared, registered = await bench.last_of(device.Appeared), await bench.last_of(runtime.Registered)
    assert (appeared.slots, appeared.total_mb, appeared.headroom_mb) == (2, 20_000, 500)
    assert (registered.provider, registered.loads_models) == ("ollama", True)
    health = await bench.last_of(runtime.HealthChanged)
    assert (health.healthy, health.models, health.suspect) == (True, ("m",), None)
    assert await bench.device_told() == ["Appeared"]


@in_virtual_time
async def test_what_a_runtime_turns_out_to_be_able_to_do_is_told_once() -> None:
    bench = Survey()
    bench.runtime.releases = "none"
    await bench.surveyor.announce()
    bench.runtime.releases = "model"
    await bench.over(20)

    told = [
        fact for fact in await bench.facts(subjects.runtime("h1", "ollama")) if isinstance(fact, runtime.Registered)
    ]
    assert [fact.releases for fact in told] == ["none", "model"]


@pytest.mark.parametrize(("pulls", "told"), [(True, ("q*",)), (False, ())])
def test_what_may_be_fetched_is_told_where_it_can_be(pulls: bool, told: tuple[str, ...]) -> None:
    @in_virtual_time
    async def go() -> None:
        bench = Survey()
        provider = Runtime(bench.card, pull=("q*",))
        provider.pulls = pulls
        surveyor = Surveyor(bench.room, AgentConfig(host="h1"), bench.beats_log, {"ollama": provider}, list)
        await surveyor.announce()

        assert (await bench.last_of(runtime.Registered)).pull == told

    go()


@in_virtual_time
async def test_a_capacity_that_nobody_knows_is_not_announced_as_one() -> None:
    bench = Survey()
    bench.card.total_mb = None
    await bench.surveyor.announce()

    assert (await bench.last_of(device.Appeared)).total_mb is None


@in_virtual_time
async def test_a_device_that_is_lost_from_the_start_is_announced_and_then_told_lost() -> None:
    bench = Survey()
    bench.card.state, bench.card.error = "lost", "GPU is lost"
    await bench.surveyor.announce()

    assert await bench.device_told() == ["Appeared", "Changed"]
    changed = await bench.last_of(device.Changed)
    assert (changed.state, changed.detail) == ("lost", "GPU is lost")


# --- what is told


@in_virtual_time
async def test_only_what_changed_is_told() -> None:
    bench = Survey()
    await bench.surveyor.announce()
    before = await bench.log.last_seq()
    await bench.over(60)
    assert await bench.log.last_seq() == before

    bench.card.state = "lost"
    bench.runtime.models = ("m", "n")
    await bench.over(6)
    bench.card.state = "healthy"
    bench.runtime.healthy, bench.runtime.models, bench.runtime.error = False, None, "refused"
    await bench.over(6)

    assert await bench.device_told() == ["Appeared", "Changed", "Changed"]
    assert (await bench.last_of(device.Changed)).state == "healthy"
    health = (await bench.facts(subjects.runtime("h1", "ollama")))[-2:]
    assert [(f.healthy, f.models, f.detail) for f in health if isinstance(f, runtime.HealthChanged)] == [
        (True, ("m", "n"), ""),
        (False, None, "refused"),
    ]


# --- heartbeats


@in_virtual_time
async def test_heartbeats_carry_claims_readings_and_looks() -> None:
    bench = Survey()
    bench.claims.append(CLAIM)
    bench.card.used_mb = 77
    await bench.surveyor.announce()
    await bench.surveyor.beat()

    ((_, beat),) = await bench.beats()
    assert (beat.host, beat.instance_id, beat.boot_id, beat.interval_s) == ("h1", "h1-1", "boot", 5.0)
    assert beat.claims == (CLAIM,)
    assert [reading.used_mb for reading in beat.devices] == [77]
    assert [look.runtime for look in beat.runtimes] == ["ollama"]
    assert not beat.stopping


@in_virtual_time
async def test_heartbeats_come_at_their_interval_and_each_after_a_look() -> None:
    bench = Survey()
    await bench.surveyor.announce()
    await bench.over(50)

    times = [at_s for at_s, _ in await bench.beats()]
    assert len(times) == 10
    assert bench.runtime.looks >= 10


@in_virtual_time
async def test_a_look_that_takes_long_delays_no_heartbeat_beyond_a_little() -> None:
    bench = Survey()
    bench.runtime.look_s = 60.0
    await bench.over(100)

    times = [at_s for at_s, _ in await bench.beats()]
    assert max(later - earlier for earlier, later in pairwise(times)) <= 7.1


@in_virtual_time
async def test_a_log_that_is_away_stops_no_heartbeats() -> None:
    """What is to be told waits; that the agent lives is said on another stream."""
    bench = Survey()
    await bench.surveyor.announce()
    bench.card.state = "lost"
    bench.log.go_away(95)
    await bench.over(100)

    assert len(await bench.beats()) >= 13
    assert await bench.device_told() == ["Appeared", "Changed"]


@in_virtual_time
async def test_a_heartbeat_that_is_not_stored_is_no_error() -> None:
    bench = Survey()
    bench.beats_log.faults.append("unavailable")
    await bench.over(12)

    assert len(await bench.beats()) == 2


@in_virtual_time
async def test_a_stopping_agent_says_so() -> None:
    bench = Survey()
    bench.surveyor.stopping = True
    await bench.surveyor.beat()

    assert (await bench.beats())[0][1].stopping


# --- suspicion


async def suspected(bench: Survey) -> None:
    """A job of this agent was misplaced."""
    await bench.surveyor.announce()
    await bench.run()
    assert bench.room.suspects["ollama"].model == "m"
    assert (await bench.runtime_told())[-1] == "Suspect"


@in_virtual_time
async def test_c4_a_runtime_whose_card_stays_idle_is_not_trusted_again_on_its_word() -> None:
    """It goes on to say that all of the model is in VRAM: that is what was not believed."""
    bench = Survey()
    bench.runtime.card_shows_load = False
    await suspected(bench)
    await bench.over(60)

    assert "ollama" in bench.room.suspects
    assert (await bench.runtime_told())[-1] == "Suspect"


@in_virtual_time
async def test_a_runtime_whose_model_is_on_the_cpu_stays_suspect_while_it_is() -> None:
    bench = Survey()
    bench.runtime.row_after_load = bench.runtime.holds("m", vram_mb=100)
    bench.runtime.resident = []
    await suspected(bench)
    await bench.over(60)

    assert "ollama" in bench.room.suspects


@in_virtual_time
async def test_a_suspect_runtime_is_trusted_again_when_the_model_is_gone() -> None:
    bench = Survey()
    bench.runtime.card_shows_load = False
    await suspected(bench)
    bench.runtime.resident = []
    await bench.over(6)

    assert bench.room.suspects == {}
    assert (await bench.last_of(runtime.HealthChanged)).suspect is None


@in_virtual_time
async def test_a_suspect_runtime_is_trusted_again_when_the_model_passes_the_check_it_failed() -> None:
    bench = Survey()
    bench.runtime.card_shows_load = False
    await suspected(bench)
    bench.card.used_mb = 5000
    await bench.over(6)

    assert bench.room.suspects == {}


@in_virtual_time
async def test_a_model_that_should_be_on_the_cpu_is_not_trusted_for_being_in_vram() -> None:
    bench = Survey(kind="cpu")
    await suspected(bench)
    await bench.over(60)

    assert "ollama" in bench.room.suspects


@pytest.mark.parametrize("what", ["unreachable", "silent"])
@in_virtual_time
async def test_c14_a_runtime_that_does_not_answer_clears_no_suspicion(what: str) -> None:
    bench = Survey()
    bench.runtime.card_shows_load = False
    await suspected(bench)
    bench.runtime.resident = None
    bench.runtime.healthy = what == "silent"
    await bench.over(30)

    assert "ollama" in bench.room.suspects


async def stuck(bench: Survey, activity: Activity) -> Suspicion:
    """The runtime gave a job no token, and shows this of itself since."""
    bench.runtime.holds("m")
    bench.runtime.idle_word = activity
    await bench.surveyor.announce()
    found = bench.room.suspects["ollama"] = Suspicion("m", "g0", "deadline: no progress within its clock")
    return found


@pytest.mark.parametrize("activity", ["busy", "unknown"])
@in_virtual_time
async def test_c31_a_runtime_that_gave_no_progress_stays_suspect_until_it_is_proven_to_idle(activity: Activity) -> None:
    """C31: unknown is not idle."""
    bench = Survey()
    await stuck(bench, activity)
    await bench.over(600)
    meanwhile = dict(bench.room.suspects)
    bench.runtime.idle_word = "idle"
    await bench.over(6)

    assert "ollama" in meanwhile
    assert bench.room.suspects == {}
    assert (await bench.last_of(runtime.HealthChanged)).suspect is None


@in_virtual_time
async def test_c31_a_runtime_that_was_proven_to_have_left_the_work_is_trusted_where_it_does_not_say_what_it_does() -> (
    None
):
    bench = Survey()
    bench.room.work_left["ollama"] = await stuck(bench, "unknown")
    await bench.over(6)

    assert bench.room.suspects == {}


@in_virtual_time
async def test_c31_what_was_proven_of_an_earlier_suspicion_says_nothing_about_the_next() -> None:
    bench = Survey()
    bench.room.work_left["ollama"] = await stuck(bench, "unknown")
    bench.room.suspects["ollama"] = Suspicion("m", "g0", "deadline: no progress within its clock")
    await bench.over(60)

    assert "ollama" in bench.room.suspects


@in_virtual_time
async def test_c31_a_model_that_is_missing_from_a_look_or_two_has_not_left_its_work() -> None:
    """C13's kind: a busy model was seen to be missing from two looks."""
    bench = Survey()
    await stuck(bench, "unknown")
    rows, bench.runtime.resident = bench.runtime.resident, []
    looks = bench.runtime.looks
    while bench.runtime.looks < looks + 2:
        await bench.over(1)
    after_two = dict(bench.room.suspects)
    bench.runtime.resident = rows
    await bench.over(60)
    back = dict(bench.room.suspects)
    bench.runtime.resident = []
    await bench.over(60)

    assert "ollama" in after_two
    assert "ollama" in back
    assert bench.room.suspects == {}


@in_virtual_time
async def test_news_about_the_health_of_a_suspect_runtime_still_names_the_suspicion() -> None:
    """Else its new catalogue would make it trusted again."""
    bench = Survey()
    bench.runtime.card_shows_load = False
    await suspected(bench)
    bench.runtime.models = ("m", "n")
    await bench.over(6)

    health = await bench.last_of(runtime.HealthChanged)
    assert health.models == ("m", "n")
    assert health.suspect is not None
    assert health.suspect.startswith("placement_disputed: ")
    known = (await bench.site()).hosts["h1"].runtime("ollama")
    assert known is not None
    assert known.suspicion is not None


@in_virtual_time
async def test_a_look_from_before_the_suspicion_does_not_clear_it() -> None:
    """The look began when the model was not there yet; while it was under way the model came, and failed."""
    bench = Survey()
    await bench.surveyor.announce()
    bench.runtime.look_s = 2.0
    task = asyncio.create_task(bench.surveyor.run())
    await asyncio.sleep(1)
    bench.room.suspects["ollama"] = Suspicion("gone", "g0", "cpu_fallback: 0.0%")
    await asyncio.sleep(1.5)
    assert "ollama" in bench.room.suspects
    await asyncio.sleep(10)
    assert bench.room.suspects == {}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@in_virtual_time
async def test_an_agent_takes_over_the_suspicions_of_the_one_before_it() -> None:
    bench = Survey()
    bench.runtime.card_shows_load = False
    await suspected(bench)
    for seq in range(1, await bench.log.last_seq() + 1):
        stored = await bench.log.get(seq)
        assert stored is not None
        if any(subjects.matches(p, stored.subject) for p in subjects.followed_by_agent("h1")):
            bench.view.apply(decode(stored))

    again = HostRoom(
        host="h1",
        boot_id="boot",
        instance_id="h1-2",
        log=bench.log,
        recorder=bench.recorder,
        payloads=bench.objects,
        inventory=bench.room.inventory,
        outputs=bench.room.outputs,
        view=bench.view,
    )
    assert again.suspects["ollama"].model == "m"
    assert again.suspects["ollama"].device == "g0"
    next_one = Surveyor(again, AgentConfig(host="h1"), bench.beats_log, {"ollama": bench.runtime}, list)
    await next_one.announce()

    assert (await bench.last_of(runtime.HealthChanged)).suspect is not None


@in_virtual_time
async def test_c34_a_runtime_that_was_down_already_is_told_again_once_its_container_is_seen_to_loop() -> None:
    bench = Survey()
    bench.runtime.healthy, bench.runtime.error = False, "its container c keeps ending and is being restarted"
    await bench.surveyor.announce()
    bench.runtime.error = "its container c is crash-looping: restarted 3 times within 600 s"
    await bench.over(20)

    told = [
        fact.detail
        for fact in await bench.facts(subjects.runtime("h1", "ollama"))
        if isinstance(fact, runtime.HealthChanged)
    ]
    assert len(told) == 2
    assert "crash-looping" in told[1]
