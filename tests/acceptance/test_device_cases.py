"""Cases C15, C17 and C19 of real devices on the whole path: a stub of the driver, and everything else real.

Submission, log, scheduler, agent, the binding of NVML and its shared library; the Ollama is a fake whose models show on
the cards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.events.device import Appeared, Changed
from gpukeeper.events.fact import Fact
from gpukeeper.events.job import Admitted, Denied, Failed, Rejected, Succeeded
from gpukeeper.events.readings import DeviceState
from gpukeeper.events.reasons import Reason
from support.cards import IDLE_MB, Cards, cards, offer_driver
from support.nats import NatsServer
from support.nvml_stub import Gpu, NvmlStub, Slice
from support.site import HOST, Served, Site, site_in
from support.waiting import until

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture"]

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
B = "GPU-bbbbbbbb-0000-0000-0000-000000000002"
C = "GPU-cccccccc-0000-0000-0000-000000000003"
D = "GPU-dddddddd-0000-0000-0000-000000000004"
SMALL = "MIG-11111111-aaaa-bbbb-cccc-000000000001"
LARGE = "MIG-22222222-aaaa-bbbb-cccc-000000000002"
TOTAL_MB = 24_564


@pytest.fixture
async def site(
    tmp_path: Path,
    nats_server: NatsServer,
    nvml: NvmlStub,
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Site]:
    """A site whose host finds the GPUs that the stub of the driver lists."""
    offer_driver(nvml_library, monkeypatch)
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = []
        site.sections["agent"] |= {"find_devices": True}
        yield site


async def begin(site: Site, host: Cards, *, meminfo: Path | None = None) -> None:
    site.served.append(Served("ollama", "ollama", host.ollama))
    site.scheduler()
    site.agent(meminfo=meminfo)
    await site.ready()


def card(uuid: str, **changes: object) -> Gpu:
    return Gpu(**{"uuid": uuid, "memory": (TOTAL_MB, TOTAL_MB - IDLE_MB), **changes})  # pyright: ignore[reportArgumentType]


def job(prompt: str, *, on: str | None = None, vram_mb: int | None = None) -> dict[str, object]:
    made: dict[str, object] = {"model": "m:8b", "prompt": prompt}
    if on is not None:
        made |= {"host": HOST, "device": on}
    if vram_mb is not None:
        made["need"] = {"vram_mb": vram_mb}
    return made


async def becomes(site: Site, device: str, state: DeviceState, *, times: int = 1) -> Changed:
    """Wait for the ``times``-th event that says so."""

    def look() -> Changed | None:
        found = [fact for fact in site.watch.of_device(HOST, device, Changed) if fact.state == state]
        return found[times - 1] if len(found) >= times else None

    return await site.watch.until(look, f"{device} is {state} ({times} times)")


async def waits_for(site: Site, job_id: str, reason: Reason) -> None:
    """Wait until the job waits for this reason. Its words may be those of its acceptance: the device has its own."""
    await site.watch.until(lambda: site.watch.site.jobs[job_id].reason == reason, f"{job_id} waits: {reason}")


def ran_on(site: Site, job_id: str, end: Fact) -> str:
    assert isinstance(end, Succeeded), end
    return site.watch.of_job(job_id, Admitted)[-1].device


# --- C15: GB10


def write_meminfo(path: Path, available_kb: int) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(f"MemTotal:       127600748 kB\nMemFree:  1000 kB\nMemAvailable:   {available_kb} kB\n")
    draft.replace(path)


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    write_meminfo(path, 118_566_368)
    return path


async def test_c15_unified_memory_takes_what_the_host_has_available_and_refuses_more_than_the_host_has(
    site: Site, nvml: NvmlStub, meminfo: Path
) -> None:
    """C15, GB10: NVML gives no memory figures, the host has 124,610 MB of which 115,787 are available."""
    async with cards(nvml, Gpu(uuid=A, name="NVIDIA GB10", memory=None, bar1=None, addressing=2)) as host:
        host.ollama.on_vram = lambda vram: write_meminfo(meminfo, 118_566_368 - vram // 1024)
        await begin(site, host, meminfo=meminfo)
        fits = await site.submit(job("fits", vram_mb=100_000))
        end = await site.watch.end(fits)
        refused = await site.watch.answer(await site.send(job("too much", vram_mb=125_000)))

    assert ran_on(site, fits, end) == A
    (appeared,) = site.watch.of_device(HOST, A, Appeared)
    assert (appeared.total_mb, appeared.unschedulable) == (124_610, None)
    (admitted,) = site.watch.of_job(fits, Admitted)
    assert admitted.reading is not None
    assert (admitted.reading.source, admitted.reading.unified) == ("meminfo", True)
    assert (admitted.reading.total_mb, admitted.usable_mb) == (124_610, 115_787)
    assert "shared with the host" in admitted.detail
    assert isinstance(refused, Rejected)
    assert refused.reason == Reason.NEED_EXCEEDS_DEVICES
    assert "124610 MB" in refused.problems[0].message
    await site.check()


async def test_c15_what_the_host_itself_uses_of_unified_memory_is_not_free(
    site: Site, nvml: NvmlStub, meminfo: Path
) -> None:
    """C15, nvtop#449: with 60 GB used by the host there are about 64 GB, whatever the part could hold."""
    async with cards(nvml, Gpu(uuid=A, name="NVIDIA GB10", memory=None, bar1=None, addressing=2)) as host:
        used_kb = 60 * 1024 * 1024
        write_meminfo(meminfo, 127_600_748 - used_kb)
        await begin(site, host, meminfo=meminfo)
        waiting = await site.submit(job("later", vram_mb=100_000))
        await waits_for(site, waiting, Reason.CAPACITY)
        await site.heartbeat(lambda beat: [each.free_mb for each in beat.devices] == [63_170])
        assert not site.watch.of_job(waiting, Admitted)
        host.ollama.on_vram = lambda vram: write_meminfo(meminfo, 118_566_368 - vram // 1024)
        write_meminfo(meminfo, 118_566_368)
        end = await site.watch.end(waiting)

    assert ran_on(site, waiting, end) == A
    await site.check()


async def test_c15_a_discrete_card_without_figures_takes_no_job(site: Site, nvml: NvmlStub) -> None:
    """C15's neighbour: what the host has says nothing about a card with memory of its own."""
    async with cards(nvml, card(A), card(B, name="NVIDIA RTX A6000", memory=None)) as host:
        await begin(site, host)
        named = await site.submit(job("on the card", on=B))
        await waits_for(site, named, Reason.NO_ROUTE)
        free = await site.submit(job("anywhere"))
        end = await site.watch.end(free)

    assert ran_on(site, free, end) == A
    appeared = site.watch.of_device(HOST, B, Appeared)[0]
    assert appeared.total_mb is None
    assert "capacity is unknown" in (appeared.unschedulable or "")
    assert not site.watch.of_job(named, Admitted)
    await site.check()


# --- C17: MIG


async def test_c17_a_mig_parent_takes_no_job_and_its_slices_take_what_fits_them(site: Site, nvml: NvmlStub) -> None:
    """C17, StableSwarmUI#388: an A100 with 80 GB on its label, and two slices of 4,864 and 19,968 MB."""
    slices = {
        0: Slice(uuid=SMALL, memory=(4_864, 4_860), instance=1),
        3: Slice(uuid=LARGE, memory=(19_968, 19_900), instance=5),
    }
    async with cards(nvml, Gpu(uuid=A, name="NVIDIA A100-SXM4-80GB", memory="!4", compute="!4", mig=slices)) as host:
        host.onto = LARGE
        await begin(site, host)
        whole = await site.submit(job("on the whole", on=A))
        large = await site.submit(job("large", vram_mb=60_000))
        await waits_for(site, whole, Reason.NO_ROUTE)
        fits = await site.submit(job("fits the large one", vram_mb=15_000))
        fits_end = await site.watch.end(fits)
        host.onto = SMALL
        await site.watch.caught_up()
        small = await site.submit({**job("fits the small one", on=SMALL, vram_mb=4_000), "model": "qwen3"})
        small_end = await site.watch.end(small)

    assert ran_on(site, fits, fits_end) == LARGE
    assert ran_on(site, small, small_end) == SMALL
    appeared = {fact.device: fact for fact in site.watch.all(Appeared)}
    assert (appeared[A].total_mb, appeared[SMALL].total_mb, appeared[LARGE].total_mb) == (None, 4_864, 19_968)
    assert "MIG is on" in (appeared[A].unschedulable or "")
    assert (appeared[SMALL].parent, appeared[LARGE].parent) == (A, A)
    assert {fact.device for fact in site.watch.all(Admitted)} == {SMALL, LARGE}
    assert not [fact for each in (whole, large) for fact in site.watch.of_job(each, Admitted)]
    await site.check()


# --- C19: a card falls off the bus


async def running_on(site: Site, host: Cards, device: str) -> str:
    """A job that has started on this card and does not end by itself."""
    host.onto = device
    host.ollama.hold = asyncio.Event()
    made = await site.submit(job(f"runs on {device}", on=device))
    await until(lambda: host.ollama.prompts[f"runs on {device}"] > 0, "the Ollama has the job")
    return made


@pytest.mark.parametrize(
    ("broken", "text"),
    [({"handle": "!15"}, "GPU is lost"), ({"handle": "!999"}, "Unknown Error"), ({"memory": "!15"}, "GPU is lost")],
    ids=["lost handle", "unknown error", "lost memory"],
)
async def test_c19_a_card_that_falls_off_the_bus_fails_its_job_and_the_others_go_on(
    site: Site, nvml: NvmlStub, broken: dict[str, str], text: str
) -> None:
    """C19, k8s-device-plugin#2038: one of four cards is lost in the middle of a job, and comes back later."""
    async with cards(nvml, *(card(each) for each in (A, B, C, D))) as host:
        await begin(site, host)
        victim = await running_on(site, host, B)
        for name, code in broken.items():
            setattr(host.gpu(B), name, code)
        host.runner_dies()
        end = await site.watch.end(victim)
        changed = await becomes(site, B, "lost")
        host.ollama.hold = None
        waiting = await site.submit(job("waits for the card", on=B))
        await waits_for(site, waiting, Reason.NO_ROUTE)
        used: set[str] = set()
        for device in (A, C, D, None):
            host.onto = device or A
            other = await site.submit(job(f"goes on, {device}", on=device))
            used.add(ran_on(site, other, await site.watch.end(other)))
        host.gpus[1] = card(B)
        host.onto = B
        host.runner_dies()
        await becomes(site, B, "healthy")
        back = await site.watch.end(waiting)

    assert isinstance(end, Failed)
    assert text in changed.detail
    assert changed.reading is not None
    assert (changed.reading.state, changed.reading.free_mb) == ("lost", None)
    assert used == {A, C, D}
    assert ran_on(site, waiting, back) == B
    assert {fact.device for fact in site.watch.all(Changed)} == {B}
    await site.check()


async def test_c19_a_card_whose_driver_hangs_is_unknown_and_the_others_go_on(site: Site, nvml: NvmlStub) -> None:
    """C19's neighbour: no error, no answer at all."""
    site.sections["agent"] |= {"reading_timeout_s": 1}
    async with cards(nvml, card(A), card(B)) as host:
        await begin(site, host)
        gate = nvml.gate()
        host.gpu(B).hang = ("memory", gate)
        host.show()
        changed = await becomes(site, B, "unknown")
        waiting = await site.submit(job("waits for the card", on=B))
        await waits_for(site, waiting, Reason.NO_ROUTE)
        other = await site.submit(job("goes on"))
        other_end = await site.watch.end(other)
        host.gpu(B).hang = None
        host.onto = B
        host.runner_dies()
        await nvml.open_gate(gate)
        await becomes(site, B, "healthy")
        back = await site.watch.end(waiting)

    assert ("no answer within 1 s" in changed.detail) or ("still not returned" in changed.detail)
    assert ran_on(site, other, other_end) == A
    assert ran_on(site, waiting, back) == B
    await site.check()


@pytest.mark.parametrize("memory", [(0, 0), (TOTAL_MB, TOTAL_MB + 1)], ids=["no total", "more free than there is"])
async def test_c19_a_card_whose_driver_talks_nonsense_takes_no_job_until_it_makes_sense(
    site: Site, nvml: NvmlStub, memory: tuple[int, int]
) -> None:
    """C19's neighbour: figures that cannot be are no figures."""
    async with cards(nvml, card(A), card(B)) as host:
        await begin(site, host)
        host.gpu(B).memory = memory
        host.show()
        changed = await becomes(site, B, "unknown")
        waiting = await site.submit(job("waits for the card", on=B))
        await waits_for(site, waiting, Reason.NO_ROUTE)
        other = await site.submit(job("goes on"))
        other_end = await site.watch.end(other)
        host.onto = B
        host.gpu(B).memory = card(B).memory
        host.runner_dies()
        await becomes(site, B, "healthy")
        back = await site.watch.end(waiting)

    assert "cannot be" in changed.detail
    assert ran_on(site, other, other_end) == A
    assert ran_on(site, waiting, back) == B
    assert not [fact for fact in site.watch.all(Denied) if fact.device == A]
    await site.check()
