"""Cases C22, C23, C37 and C58 on the whole path: where room is, whose it is, and who stays.

The Ollama is a fake whose models show on the cards of the stub driver, as this process; the rest is real.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.device import Reclaimed, ReclaimRequested
from gpukeeper.events.job import Admitted, Rejected, Succeeded, Unroutable
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import ModelUnloaded, Pinned, Unpinned
from support.cards import IDLE_MB, MB, cards
from support.nats import NatsServer
from support.nvml_stub import NvmlStub
from support.reclaim import TOTAL_MB, A, B, begin, card, command, job, reclaim_site, resident, waits_for
from support.site import Site

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture"]

C = "GPU-cccccccc-0000-0000-0000-000000000003"
D = "GPU-dddddddd-0000-0000-0000-000000000004"
#: Somebody's process that no registry lists.
STRANGER = 4242
GIB = 1024


@pytest.fixture
async def site(
    tmp_path: Path,
    nats_server: NatsServer,
    nvml: NvmlStub,
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Site]:
    async with reclaim_site(tmp_path, nats_server, nvml_library, monkeypatch) as site:
        yield site


def stranger(mb: int) -> str:
    """What the driver lists of that process."""
    return f"{STRANGER}:{mb * MB}:none"


async def rested(site: Site, mb: int) -> None:
    """Wait until a model of so many MB has been idle for its grace, by the heartbeats."""
    await site.new_heartbeat(
        lambda beat: any(
            reading.idle_since is not None and any(row.vram_bytes == mb * MB for row in reading.resident or ())
            for reading in beat.runtimes
        ),
        times=3,
    )


# --- C22: the empty card


@pytest.mark.parametrize("vram_mb", [4_506, None], ids=["declared", "not declared"])
async def test_c22_a_job_goes_to_the_empty_card_and_nothing_is_evicted(
    site: Site, nvml: NvmlStub, vram_mb: int | None
) -> None:
    """C22, ollama#16391: 308 MB are free on the large card, where an idle model could be thrown out."""
    large = card(A, total_mb=48 * GIB)
    async with cards(nvml, large, card(B, total_mb=16 * GIB)) as host:
        host.pid = os.getpid()
        held_mb = 48 * GIB - IDLE_MB - 308
        host.ollama.installed = {"large:1": held_mb * MB, "embedder:1": 4_506 * MB}
        await begin(site, host)
        await resident(site, host, "large:1", on=A)
        await rested(site, held_mb)
        host.onto = B
        made = await site.submit(job("embedder:1", "embed it", vram_mb=vram_mb))
        end = await site.watch.end(made)

    assert isinstance(end, Succeeded), end
    assert [fact.device for fact in site.watch.of_job(made, Admitted)] == [B]
    assert not site.watch.all(ReclaimRequested)
    assert host.ollama.unloads == 0
    await site.check()


async def test_c22_what_a_stranger_holds_is_counted_and_never_taken_back(site: Site, nvml: NvmlStub) -> None:
    """C22, ollama#8430: A1111 holds 7.2 of 12 GB on the second card."""
    held_mb = 7_373
    second = card(B, total_mb=12 * GIB, used_mb=IDLE_MB + held_mb, compute=stranger(held_mb))
    async with cards(nvml, card(A, total_mb=4 * GIB), second) as host:
        host.ollama.installed = {"m:1": 6_000 * MB, "small:1": 3_000 * MB}
        host.pid = os.getpid()
        await begin(site, host)
        waiting = await site.submit(job("m:1", "needs the stranger's room", vram_mb=6_000))
        await waits_for(site, waiting, Reason.CAPACITY)
        words = site.watch.site.jobs[waiting].detail
        host.onto = B
        beside = await site.run(job("small:1", "fits beside it", on=B, vram_mb=3_000))
        host.runner_dies()
        host.gpus[1] = card(B, total_mb=12 * GIB)
        host.show()
        end = await site.watch.end(waiting)

    assert isinstance(beside, Succeeded), beside
    assert isinstance(end, Succeeded), end
    assert f"used {IDLE_MB + held_mb} MB by pid {STRANGER} ({held_mb} MB)" in words
    asked = [fact.runtime for fact in site.watch.all(ReclaimRequested)]
    assert set(asked) <= {"ollama"}
    await site.check()


# --- C23: 82 GiB


async def test_c23_a_job_that_does_not_fit_now_waits_and_says_for_what(site: Site, nvml: NvmlStub) -> None:
    """C23, AndPuQing/gflow#208: 82 GiB on a card of 96, of which a hand-started vLLM holds 21.3."""
    total_mb, held_mb, asked_mb = 96 * GIB, 21_811, 82 * GIB
    async with cards(nvml, card(A, total_mb=total_mb, used_mb=held_mb, compute=stranger(held_mb))) as host:
        host.ollama.installed = {"huge:1": 80 * GIB * MB}
        await begin(site, host)
        waiting = await site.submit(job("huge:1", "huge", vram_mb=asked_mb))
        await waits_for(site, waiting, Reason.CAPACITY)
        words = site.watch.site.jobs[waiting].detail
        assert not site.watch.of_job(waiting, Admitted)
        host.gpus[0] = card(A, total_mb=total_mb)
        host.show()
        end = await site.watch.end(waiting)

    for part in (
        A,
        f"Asked for {asked_mb} MB",
        f"free {total_mb - held_mb} of {total_mb} MB",
        f"pid {STRANGER} ({held_mb} MB)",
    ):
        assert part in words
    assert isinstance(end, Succeeded), end
    await site.check()


async def test_c23_a_job_that_no_device_could_ever_hold_is_refused_at_once(site: Site, nvml: NvmlStub) -> None:
    async with cards(nvml, card(A, total_mb=48 * GIB), card(B, total_mb=24 * GIB)) as host:
        host.ollama.installed = {"huge:1": 80 * GIB * MB}
        await begin(site, host)
        answer = await site.watch.answer(await site.send(job("huge:1", "huge", vram_mb=82 * GIB)))

    assert isinstance(answer, Rejected)
    assert answer.reason == Reason.NEED_EXCEEDS_DEVICES
    (problem,) = answer.problems
    assert (problem.path, problem.value) == ("need.vram_mb", str(82 * GIB))
    assert f"{A} with {48 * GIB} MB" in problem.message
    await site.check()


# --- C37: by memory, not by number


async def test_c37_one_release_of_a_model_that_is_spread_over_four_cards_makes_room_for_the_next(
    site: Site, nvml: NvmlStub
) -> None:
    """C37, llama.cpp#25326: 4 x 48 GB, 100 GB resident, 29 GB asked."""
    async with cards(nvml, *(card(each, total_mb=48 * GIB) for each in (A, B, C, D))) as host:
        host.pid = os.getpid()
        host.ollama.installed = {"resident:1": 100 * GIB * MB, "asked:1": 29 * GIB * MB}
        host.spread = (A, B, C, D)
        await begin(site, host)
        brought = job("resident:1", "over four")
        brought["need"] = {"vram_mb": 25 * GIB, "gpus": 4}
        assert isinstance(await site.run(brought), Succeeded)
        made = await site.submit(job("asked:1", "needs a card", vram_mb=29 * GIB))
        end = await site.watch.end(made)

    assert isinstance(end, Succeeded), end
    (requested,) = site.watch.all(ReclaimRequested)
    (reclaimed,) = site.watch.all(Reclaimed)
    assert (requested.model, requested.promised_mb) == ("resident:1", 25 * GIB)
    assert reclaimed.measured_mb == 25 * GIB
    assert host.ollama.unloads == 1
    await site.check()


# --- C58: pinned


async def test_c58_what_is_pinned_stays_and_the_job_that_needs_its_room_hears_of_it(site: Site, nvml: NvmlStub) -> None:
    """C58, LocalAI#11101: a pin wins over whoever needs the room; that one gets a capacity result."""
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = {"pinned:1": 16_000 * MB, "big:1": 10_000 * MB}
        await begin(site, host)
        await resident(site, host, "pinned:1")
        await command(site, "pin", runtime="ollama", model="pinned:1")
        await site.watch.until(lambda: site.watch.all(Pinned), "it is pinned")
        await rested(site, 16_000)
        refused = await site.run(job("big:1", "at once or not at all", vram_mb=11_000, on_capacity="reject"))
        waiting = await site.submit(job("big:1", "waits", vram_mb=11_000))
        await waits_for(site, waiting, Reason.CAPACITY)
        words = site.watch.site.jobs[waiting].detail
        assert "pinned:1" in host.ollama.loaded
        assert host.ollama.unloads == 0
        await command(site, "unpin", runtime="ollama", model="pinned:1")
        end = await site.watch.end(waiting)

    assert isinstance(refused, Unroutable), refused
    assert refused.reason == Reason.CAPACITY
    for said in (refused.detail, words):
        assert "ollama/pinned:1 holds 16000 MB and stays: it is pinned (pinned)" in said
    assert isinstance(end, Succeeded), end
    assert site.watch.all(Unpinned)
    assert len(site.watch.all(ReclaimRequested)) == 1
    await site.check()


async def test_c58_a_pin_wins_over_a_job_and_a_registry_that_want_the_model_gone(site: Site, nvml: NvmlStub) -> None:
    """C58: torn down after every request there; here it stays until it is unpinned, and goes again from then on."""
    async with cards(nvml, card(A)) as host:
        host.ollama.installed = {"pinned:1": 16_000 * MB, "big:1": 10_000 * MB}
        await begin(site, host, residency="unload")
        await command(site, "pin", runtime="ollama", model="pinned:1")
        await site.watch.until(lambda: site.watch.all(Pinned), "it is pinned")
        for number in range(2):
            end = await site.run(job("pinned:1", f"unload {number}", residency="unload"))
            assert isinstance(end, Succeeded), end
            assert "pinned:1" in host.ollama.loaded
        assert host.ollama.loads == 1
        assert not site.watch.all(ModelUnloaded)
        # What it was told to keep for ever, it keeps for ever: only our word makes it go again.
        await command(site, "unpin", runtime="ollama", model="pinned:1")
        await site.watch.until(lambda: site.watch.all(Unpinned), "it is unpinned")
        after = await site.run(job("big:1", "needs the room", vram_mb=TOTAL_MB - 2_000))

    assert isinstance(after, Succeeded), after
    assert [fact.model for fact in site.watch.all(ReclaimRequested)] == ["pinned:1"]
    # The last job's own model went with it.
    assert host.ollama.loaded == {}
    await site.check()
