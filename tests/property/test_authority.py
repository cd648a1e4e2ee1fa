"""Invariants 2, 5 and 10 over the agent's own code: random devices, runtimes, jobs, faults and crashes.

The agent's attempts, turns, loads, handoffs, tenancy, wishes and surveyor run in virtual time over a log in memory, on
cards and runtimes with a truth of their own (:mod:`support.world`). Whatever they ask of a runtime, and whatever they
append, is held against the rules as it happens (:mod:`support.worldchecks`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.memory.release import Asker
from gpukeeper.capacity.decision import Question, decide
from gpukeeper.capacity.device import Device
from gpukeeper.capacity.need import Need
from gpukeeper.capacity.preview import Candidate, preview
from gpukeeper.events import device as device_facts
from gpukeeper.events import runtime as runtime_facts
from gpukeeper.events.readings import Releases
from support.virtual_time import in_virtual_time, now
from support.world import LoadMode, LookMode, ReleaseMode, WorldCard, WorldRuntime
from support.worldchecks import Checks, jobs_left
from support.worldhost import HOST, Host

MODELS = ("a", "b", "c")
RELEASE_MODES: tuple[ReleaseMode, ...] = get_args(ReleaseMode)
LOAD_MODES: tuple[LoadMode, ...] = get_args(LoadMode)
LOOK_MODES: tuple[LookMode, ...] = get_args(LookMode)
#: Seconds in which everything that waits comes to its end once nothing is wrong any more.
HEALED_S = 200


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as the agent finds it."""

    cards: tuple[tuple[int, int, int], ...]
    #: Its cards by place (all where empty), what it can release, its grace, what it holds at
    #: the start, and how it lets go.
    runtimes: tuple[tuple[tuple[int, ...], Releases, float, tuple[tuple[str, int], ...], int], ...]
    sizes: dict[str, int]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happens."""

    what: str
    after_s: float
    #: Which card, which runtime, which model, and how: each step makes of them what it needs.
    card: int = 0
    runtime: int = 0
    model: str = "a"
    how: int = 0


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    cards = draw(
        st.lists(
            st.tuples(st.sampled_from([8000, 10_000, 14_000]), st.sampled_from([1, 2]), st.sampled_from([0, 500])),
            min_size=1,
            max_size=3,
        )
    )
    places = st.lists(st.integers(0, len(cards) - 1), max_size=2, unique=True).map(lambda some: tuple(sorted(some)))
    holds = st.lists(
        st.tuples(st.sampled_from(MODELS), st.integers(0, 2)), min_size=1, max_size=3, unique_by=lambda each: each[0]
    )
    hows = st.integers(0, len(RELEASE_MODES) + 3).map(lambda how: how if how < len(RELEASE_MODES) else 0)
    kinds: st.SearchStrategy[Releases] = st.sampled_from(["model", "model", "all", "none"])
    runtimes = draw(
        st.lists(
            st.tuples(places, kinds, st.sampled_from([0.0, 6.0, 12.0, 30.0]), holds.map(tuple), hows),
            min_size=2,
            max_size=3,
        )
    )
    sizes = {model: draw(st.sampled_from([2500, 3500, 5000, 7000])) for model in MODELS}
    return Layout(cards=tuple(cards), runtimes=tuple(runtimes), sizes=sizes)


#: By how often each comes.
WHAT = (
    *["submit"] * 9,
    *["wait"] * 4,
    *["release_mode"] * 3,
    *["load_mode", "look_mode", "look_late", "reading", "reading_late"],
    *["foreign"] * 2,
    *["unmanaged", "pin", "unpin", "drain", "resume", "cancel", "cancel", "keep", "wish", "wish", "preview"],
    *["kill", "lose_row"],
)


def steps() -> st.SearchStrategy[list[Step]]:
    return st.lists(
        st.builds(
            Step,
            what=st.sampled_from(WHAT),
            after_s=st.sampled_from([0.0, 0.001, 0.003, 0.3, 1.0, 2.5, 6.0]),
            card=st.integers(0, 2),
            runtime=st.integers(0, 2),
            model=st.sampled_from(MODELS),
            how=st.integers(0, 7),
        ),
        min_size=12,
        max_size=45,
    )


def build(layout: Layout) -> Host:
    cards = [
        WorldCard(Device(id=f"g{place}", kind="gpu", name="card", slots=slots, headroom_mb=headroom_mb), total_mb)
        for place, (total_mb, slots, headroom_mb) in enumerate(layout.cards)
    ]
    runtimes: list[WorldRuntime] = []
    for number, (places, releases, grace_s, holds, how) in enumerate(layout.runtimes):
        config = RuntimeConfig(
            name=f"r{number}",
            provider="ollama",
            url="http://x",
            container=f"r{number}",
            devices=tuple(f"g{place}" for place in places),
            idle_grace_s=grace_s,
            release_timeout_s=9.0,
        )
        runtime = WorldRuntime(config, releases, cards, layout.sizes)
        runtime.release_mode = RELEASE_MODES[how]
        for model, place in holds:
            card = runtime.cards[place % len(runtime.cards)]
            if card.free_mb >= layout.sizes[model]:
                runtime.put(model, card)
        runtimes.append(runtime)
    return Host(cards, runtimes, now)


class Play:
    """One example: the steps, one after another, with the rules looked at after each."""

    def __init__(self, layout: Layout) -> None:
        self.host = build(layout)
        self.checks = Checks(self.host)

    async def begin(self) -> None:
        await self.host.begin()
        await self.checks.follow()
        self.checks.catch_up()

    async def go_on(self, seconds: float) -> None:
        """Let time pass, with a scheduler that looks twice a second."""
        while seconds > 0:
            await self.host.schedule()
            await asyncio.sleep(min(seconds, 0.5))
            seconds -= 0.5
        self.look()

    def look(self) -> None:
        for device, follower in (("agent", self.host.agent.follower),):
            if follower.broken.done() and not follower.broken.cancelled():
                self.host.broken.append(f"the {device}'s view broke: {follower.broken.exception()!r}")
        assert not self.host.broken, "\n".join(self.host.broken)

    async def do(self, step: Step) -> None:
        host = self.host
        card = host.cards[step.card % len(host.cards)]
        runtime = host.runtimes[step.runtime % len(host.runtimes)]
        device = card.device.id
        loop = asyncio.get_running_loop()
        match step.what:
            case "submit":
                mine = card if card in runtime.cards else runtime.cards[0]
                declared = runtime.sizes[step.model] if step.how % 2 else None
                residency = ("unload", "pin")[step.how - 6] if step.how >= 6 and step.how != 7 else None
                await host.submit(mine.device.id, runtime.name, step.model, vram_mb=declared, residency=residency)
                await host.schedule()
            case "wait":
                await self.go_on(5.0 * (1 + step.how))
            case "release_mode":
                runtime.release_mode = RELEASE_MODES[step.how % len(RELEASE_MODES)]
            case "load_mode":
                runtime.load_mode = LOAD_MODES[step.how % len(LOAD_MODES)]
            case "look_mode":
                runtime.look_mode = LOOK_MODES[step.how % len(LOOK_MODES)]
            case "look_late":
                runtime.look_s = (0.0, 0.05, 1.0, 3.0)[step.how % 4]
            case "reading":
                card.state = ("healthy", "healthy", "unknown", "lost")[step.how % 4]  # type: ignore[assignment]
            case "reading_late":
                card.read_s = (0.0, 0.02, 0.5, 1.2)[step.how % 4]
            case "foreign":
                runtime.foreign_until_s = loop.time() + (0.5, 5.0, 30.0)[step.how % 3]
            case "unmanaged":
                card.held["somebody", "else"] = min((0, 500, 2000, 6000)[step.how % 4], max(0, card.free_mb))
            case "pin":
                model = None if step.how == 0 else step.model
                await host.put(runtime_facts.Pinned(host=HOST, runtime=runtime.name, model=model, actor="mo"))
            case "unpin":
                for pinned in (None, *MODELS):
                    await host.put(runtime_facts.Unpinned(host=HOST, runtime=runtime.name, model=pinned, actor="mo"))
            case "drain":
                await host.put(device_facts.Drained(host=HOST, device=device, command_seq=1, actor="mo"))
            case "resume":
                await host.put(device_facts.Resumed(host=HOST, device=device, command_seq=1, actor="mo"))
            case "cancel":
                for job in list(host.jobs)[-1 - step.how :]:
                    await host.cancel(job)
            case "keep":
                runtime.kept ^= {step.model}
            case "wish":
                wanted = device_facts.ReclaimWanted(
                    host=HOST,
                    device=device,
                    command_seq=1,
                    actor="mo",
                    runtime=runtime.name if step.how % 2 else None,
                    vram_mb=(None, 3000, 9000)[step.how % 3],
                )
                await host.put(wanted)
            case "preview":
                self.preview_changes_nothing()
            case "kill":
                await self.kill()
            case "lose_row":
                runtime.look_mode = "row_missing"
                loop.call_later(6.0, setattr, runtime, "look_mode", "ok")
            case _:
                raise AssertionError(step.what)

    async def kill(self) -> None:
        await self.host.agent.kill()
        self.checks.agent_is_gone()
        await self.host.new_agent()

    def preview_changes_nothing(self) -> None:
        """Invariant 10, on the agent's own state and the world's."""
        host, room = self.host, self.host.agent.room
        before = self._all()
        for card in host.cards:
            for runtime in host.runtimes:
                question = Question(
                    device=card.device,
                    reading=card.reading(),
                    reserved_mb=room.ledger.unseen_mb(card.reading()),
                    need=Need(vram_mb=7000, source="declared"),
                    owners=room.owners_on(card.device.id),
                )
                decide(question)
                candidate = Candidate(host=HOST, runtime=runtime.name, question=question)
                preview("a", [candidate]).sentences()
                room.handoff.plan(card.device, 7000, Asker(turn_on=(card.device.id,)))
        assert self._all() == before

    def _all(self) -> list[Any]:
        host, room = self.host, self.host.agent.room
        return [
            room.ledger,
            dict(room.blocked),
            dict(room.suspects),
            [room.turns.taken(card.device.id) for card in host.cards],
            [room.tenancy.reading(runtime.name) for runtime in host.runtimes],
            room.tenancy.tenants(room.gpu_ids(), room.view.pins),
            [dict(card.held) for card in host.cards],
            [(runtime.loading, runtime.working, sorted(runtime.sits)) for runtime in host.runtimes],
            len(host.events),
            dict(self.checks.counts),
        ]

    async def heal_and_rest(self) -> None:
        """Nothing is wrong any more: all that was begun comes to its end, and everything is given back."""
        host = self.host
        for runtime in host.runtimes:
            runtime.heal()
            runtime.look_s = 0.0
        for card in host.cards:
            card.state, card.read_s = "healthy", 0.0
            card.held.pop(("somebody", "else"), None)
        await self.go_on(HEALED_S / 2)
        for runtime in host.runtimes:
            runtime.heal()
        host.paused = True
        await self.go_on(HEALED_S / 2)
        left = list(jobs_left(host))
        assert not left, left
        await host.agent.stop()
        self.checks.at_rest()
        self.look()
        strays = [task for task in asyncio.all_tasks() if task not in host.own_tasks and not task.done()]
        assert not strays, strays


async def played(layout: Layout, script: list[Step]) -> Play:
    play = Play(layout)
    await play.begin()
    for step in script:
        await play.go_on(step.after_s)
        await play.do(step)
        play.look()
    await play.go_on(1.0)
    await play.heal_and_rest()
    return play


#: What all examples together came to: a property over worlds in which nothing happens proves nothing.
SEEN: Counter[str] = Counter()


@settings(max_examples=150, derandomize=True, phases=(Phase.generate, Phase.shrink))
@given(layout=layouts(), script=steps())
def test_whatever_happens_memory_is_given_and_taken_by_the_rules(layout: Layout, script: list[Step]) -> None:
    @in_virtual_time
    async def go() -> None:
        play = await played(layout, script)
        SEEN.update(play.checks.counts)

    go()


def test_the_worlds_above_are_eventful() -> None:
    if not SEEN:
        pytest.skip("they were not played in this run")
    for what, times in {"load": 30, "release": 10, "Reclaimed": 3, "ReclaimFailed": 3, "blocked": 1, "run": 30}.items():
        assert SEEN[what] >= times, SEEN
