"""Cases of Ollama on measured cards over the whole path: loads, cancels, rows that come and go, residency, fetches.

A stub of the driver and everything else real: submission, log, scheduler, agent, the binding of NVML. The Ollamas are
fakes whose models show on the cards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpukeeper.events.device import ReclaimRequested, Released
from gpukeeper.events.job import (
    Admitted,
    Cancelled,
    CancelRequested,
    Denied,
    Failed,
    PlacementFailed,
    PlacementVerified,
    Rejected,
    Started,
    Succeeded,
)
from gpukeeper.events.readings import Heartbeat
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import (
    HealthChanged,
    ModelLoaded,
    ModelUnloaded,
    Pinned,
    Provisioned,
    ProvisionFailed,
    ProvisionProgress,
    ProvisionStarted,
    Suspect,
)
from support.cards import IDLE_MB, Cards, cards, offer_driver
from support.clisite import environment
from support.fake_http import Fault
from support.llamacpp_router import FakeLlamaRouter
from support.nats import NatsServer
from support.nvml_stub import MB, Gpu, NvmlStub
from support.ollama import FakeOllama
from support.site import HOST, Served, Site, site_in
from support.waiting import until

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture"]

A = "GPU-aaaaaaaa-0000-0000-0000-000000000001"
TOTAL_MB = 24_564
#: What the Ollama says of `m:8b`, in MB, rounded up.
M_MB = 4_900


@pytest.fixture
async def site(
    tmp_path: Path,
    nats_server: NatsServer,
    nvml: NvmlStub,
    nvml_library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Site]:
    """A site whose host has one GPU of the stub, and looks at it every second."""
    offer_driver(nvml_library, monkeypatch)
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = []
        site.sections["agent"] |= {"find_devices": True, "idle_grace_s": 1}
        yield site


@pytest.fixture
async def host(nvml: NvmlStub) -> AsyncIterator[Cards]:
    async with cards(nvml, Gpu(uuid=A, memory=(TOTAL_MB, TOTAL_MB - IDLE_MB))) as host:
        yield host


async def begin(site: Site, host: Cards, *, slots: int = 1, **settings: object) -> None:
    """Start the parts, with the Ollama of the cards in the registry."""
    if slots != 1:
        site.devices = [{"id": A, "slots": slots}]
    host.ollama.echo = True
    given = {"sole_client": True, "release_timeout_s": 3, **settings}
    site.served.append(Served("ollama", "ollama", host.ollama, given))
    site.scheduler()
    site.agent()
    await site.ready()


def job(prompt: str, model: str = "m:8b", **fields: object) -> dict[str, object]:
    return {"model": model, "prompt": prompt, **fields}


async def asked(host: Cards, prompt: str) -> None:
    """Wait until the Ollama has the work of a job."""
    await until(lambda: host.ollama.prompts[prompt] > 0, f"the Ollama is asked {prompt!r}")


async def waits_for(site: Site, job_id: str, reason: Reason) -> str:
    """Wait until the job waits for this reason, and return it in words."""

    def look() -> bool:
        known = site.watch.site.jobs[job_id]
        return known.reason == reason

    await site.watch.until(look, f"{job_id} waits: {reason}")
    return site.watch.site.jobs[job_id].detail


async def succeeds(site: Site, job_id: str) -> Succeeded:
    end = await site.watch.end(job_id)
    assert isinstance(end, Succeeded), end
    return end


async def preview(site: Site, *arguments: str) -> dict[str, Any]:
    """`gpuq preview --json` in a process of its own."""
    config = site.folder / "scheduler.toml"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "gpukeeper.cli.main", "preview", "--json", "--config", str(config)),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment() | {"GPUQ_DATA": str(site.data)},
    )
    out, err = await process.communicate()
    assert out, err.decode()
    return json.loads(out)


# --- C4: the two sources disagree


async def test_c4_a_model_that_is_all_in_vram_by_its_own_word_alone_does_not_start_and_its_runtime_is_left_alone(
    site: Site, host: Cards
) -> None:
    """C4, ollama#7323: ps says 100 %, and the card stays as idle as it was; later the card bears it out."""
    follow, host.ollama.on_vram = host.ollama.on_vram, None
    assert follow is not None
    await begin(site, host)
    victim = await site.submit(job("never sent"))
    end = await site.watch.end(victim)
    waiting = await site.submit(job("sent later"))
    why = await waits_for(site, waiting, Reason.NO_ROUTE)
    sent_before = dict(host.ollama.prompts)
    host.ollama.on_vram = follow
    follow(host.ollama.loaded["m:8b"].vram)
    await succeeds(site, waiting)

    assert isinstance(end, Failed)
    assert end.reason == Reason.PLACEMENT_DISPUTED
    (placement,) = site.watch.of_job(victim, PlacementFailed)
    assert (placement.ratio, placement.vram_bytes) == (1.0, 5_137_025_024)
    assert (placement.device_before_mb, placement.device_after_mb) == (IDLE_MB, IDLE_MB)
    assert "vram: runtime; device: rise" in placement.sources
    assert f"went from {IDLE_MB} MB to {IDLE_MB} MB" in placement.detail
    (suspect,) = site.watch.all(Suspect)
    assert (suspect.runtime, suspect.reason) == ("ollama", Reason.PLACEMENT_DISPUTED)
    assert "is suspect: placement_disputed" in why
    assert sent_before == {}
    assert host.ollama.loads == 1
    assert [fact.suspect for fact in site.watch.all(HealthChanged)][-1] is None
    await site.check()


# --- C9: a cancel while the prompt is read


async def test_c9_a_cancel_during_the_prompt_keeps_the_slot_until_the_deadline_where_nothing_proves_a_stop(
    site: Site, host: Cards
) -> None:
    """C9, ollama#11889: the runner does not notice that its client has left."""
    site.sections["agent"] |= {"stop_proof_s": 3}
    await begin(site, host)
    host.ollama.hold_prompt = asyncio.Event()
    first = await site.submit(job("long prompt"))
    await asked(host, "long prompt")
    second = await site.submit(job("next"))
    await site.watch.fact(first, Started)
    await site.command("cancel", first)
    await site.heartbeat(lambda beat: [(claim.job, claim.phase) for claim in beat.claims] == [(first, "stopping")])
    await site.watch.caught_up()
    ended_early = site.watch.ends(first)
    slot_kept = site.watch.site.free_slots(site.watch.site.devices[f"{HOST}/{A}"]) == 0
    asked_early = host.ollama.prompts["next"]
    end = await site.watch.end(first)
    host.ollama.hold_prompt.set()
    await succeeds(site, second)

    assert isinstance(end, Cancelled)
    assert (ended_early, slot_kept, asked_early) == ([], True, 0)
    kinds = [type(event.data) for event in site.watch.events]
    assert kinds.index(CancelRequested) < kinds.index(Cancelled) < kinds.index(Released)
    second_admitted = next(
        n for n, event in enumerate(site.watch.events) if event.data in site.watch.of_job(second, Admitted)
    )
    assert kinds.index(Released) < second_admitted
    await site.check()


async def test_c9_a_runtime_that_is_proven_to_have_stopped_gives_the_slot_back_before_the_deadline(
    site: Site, host: Cards
) -> None:
    """C9's neighbour: the deadline would come after the test has given up; the runner is gone before."""
    await begin(site, host)
    host.ollama.hold_prompt = asyncio.Event()
    first = await site.submit(job("long prompt"))
    await asked(host, "long prompt")
    await site.watch.fact(first, Started)
    await site.command("cancel", first)
    await site.heartbeat(lambda beat: any(claim.phase == "stopping" for claim in beat.claims))
    host.ollama.hold_prompt = None
    host.runner_dies()
    end = await site.watch.end(first, within_s=20)
    await succeeds(site, await site.submit(job("next")))

    assert isinstance(end, Cancelled)
    await site.check()


# --- C10: the job that asked for the load is cancelled


@pytest.mark.parametrize("slots", [1, 2])
async def test_c10_a_cancel_in_mid_load_does_not_break_the_load_off_for_the_job_behind(
    site: Site, host: Cards, slots: int
) -> None:
    """C10, ollama#8398: a load is aborted when the connection that triggered it drops."""
    await begin(site, host, slots=slots)
    host.ollama.hold_load = asyncio.Event()
    first = await site.submit(job("first"))
    await until(lambda: host.ollama.load_calls == 1, "the load has begun")
    second = await site.submit(job("second"))
    if slots == 2:
        await site.watch.fact(second, Admitted)
    await site.command("cancel", first)
    end = await site.watch.end(first)
    host.ollama.hold_load.set()
    await succeeds(site, second)

    assert isinstance(end, Cancelled)
    assert (host.ollama.loads, host.ollama.aborted, host.ollama.load_calls) == (1, 0, 1)
    assert host.ollama.prompts == {"second": 1}
    (loaded,) = site.watch.all(ModelLoaded)
    assert (loaded.job, loaded.vram_mb) == (first, None)
    await site.check()


# --- C13: a row is missing from a look or two


async def test_c13_a_busy_model_that_a_look_leaves_out_is_not_loaded_once_more(site: Site, host: Cards) -> None:
    """C13, BASTION 0.4.1: two slots, one job runs, and ps leaves its model out when the second one comes."""
    await begin(site, host, slots=2)
    host.ollama.hold = asyncio.Event()
    first = await site.submit(job("first"))
    await asked(host, "first")
    await site.heartbeat(lambda beat: any(row.resident for row in beat.runtimes))
    host.ollama.ps_missing = 10_000
    second = await site.submit(job("second"))
    denied = await site.watch.fact(second, Denied)
    host.ollama.ps_missing = 0
    await asked(host, "second")
    host.ollama.hold.set()
    await succeeds(site, first)
    await succeeds(site, second)

    assert denied.reason == Reason.RESIDENCY_UNKNOWN
    assert "does not list m:8b now, though a job of ours uses it" in denied.detail
    assert (host.ollama.loads, host.ollama.unloads, host.ollama.load_calls) == (1, 0, 1)
    assert not site.watch.all(PlacementFailed)
    assert not site.watch.all(Suspect)
    await site.check()


@pytest.mark.parametrize("missing", [1, 2])
async def test_c13_one_or_two_looks_without_an_idle_model_are_no_unload(site: Site, host: Cards, missing: int) -> None:
    """C13: the next job finds the model where it was."""
    site.sections["agent"] |= {"heartbeat_s": 60, "idle_grace_s": 300}
    site.sections["scheduler"] |= {"claim_ttl_s": 300}
    await begin(site, host)
    await succeeds(site, await site.submit(job("first")))
    host.ollama.ps_missing = missing
    second = await site.submit(job("second"))
    await succeeds(site, second)

    assert (host.ollama.loads, host.ollama.load_calls, host.ollama.unloads) == (1, 1, 0)
    assert not site.watch.all(Suspect)
    assert len(site.watch.of_job(second, Admitted)) == 1
    await site.check()


async def test_c13_a_look_without_the_row_proves_no_idleness(site: Site, host: Cards) -> None:
    """C13: for its only client the Ollama is idle, until a look leaves a model out: the grace begins anew."""
    await begin(site, host)
    await succeeds(site, await site.submit(job("first")))
    at = ""

    def idle_with_row(beat: Heartbeat) -> bool:
        return any(row.resident and row.idle_since and row.read_at > at for row in beat.runtimes)

    before = (await site.heartbeat(idle_with_row)).runtimes[0]
    at = before.read_at
    host.ollama.ps_missing = 1
    without = (
        await site.heartbeat(lambda beat: any(row.resident == () and row.read_at > at for row in beat.runtimes))
    ).runtimes[0]
    at = without.read_at
    after = (await site.heartbeat(idle_with_row)).runtimes[0]

    assert before.idle_since is not None
    assert before.idle_since < without.read_at
    assert (without.activity, without.idle_since) == ("unknown", None)
    assert after.idle_since is not None
    assert after.idle_since > without.read_at
    assert host.ollama.unloads == 0
    await site.check()


class Neighbour:
    """A second Ollama on the card of a host, with a model of its own."""

    def __init__(self, host: Cards) -> None:
        self._host = host
        self.ollama = FakeOllama({"other:13b": 8_000 * MB})
        self.ollama.count_prompts = True
        self.ollama.on_vram = self._follow

    def _follow(self, vram_bytes: int) -> None:
        self._host.gpu(A).memory = (TOTAL_MB, TOTAL_MB - IDLE_MB - vram_bytes // MB)
        self._host.show()


async def with_neighbour(site: Site, host: Cards, **settings: object) -> Neighbour:
    """Two Ollamas on one card: the neighbour holds its model and has been idle for its whole grace."""
    other = Neighbour(host)
    await other.ollama.__aenter__()
    given = {"sole_client": True, "release_timeout_s": 3, **settings}
    site.served.append(Served("other", "ollama", other.ollama, given))
    await begin(site, host)
    await succeeds(site, await site.submit(job("warm it", "other:13b")))
    return other


async def test_c13_a_busy_model_of_a_neighbour_that_looks_leave_out_is_neither_free_memory_nor_let_go(
    site: Site, host: Cards
) -> None:
    """C13: somebody else's request is in flight there, two looks leave the row out, and the memory is wanted."""
    other = await with_neighbour(site, host, sole_client=False)
    host.gpu(A).utilization = 100
    host.show()
    other.ollama.ps_missing = 2
    wanted = await site.submit(job("wants it", need={"vram_mb": 20_000}))
    why = await waits_for(site, wanted, Reason.CAPACITY)
    await until(lambda: other.ollama.ps_missing == 0, "the looks without the row were taken")
    await site.heartbeat(lambda beat: any(row.runtime == "other" and row.resident for row in beat.runtimes), times=3)
    await site.watch.caught_up()
    still = site.watch.site.jobs[wanted].reason
    host.gpu(A).utilization = 0
    host.show()
    await succeeds(site, wanted)

    assert "16264" in why, why
    assert still == Reason.CAPACITY
    (released,) = site.watch.all(ReclaimRequested)
    assert (released.runtime, released.model) == ("other", "other:13b")
    assert other.ollama.unloads == 1
    await other.ollama.__aexit__()
    await site.check()


# --- C14: ps does not say


FAULTS: dict[str, dict[str, Any]] = {
    "500": {"kind": "status", "status": 500},
    "HTML": {"kind": "html"},
    "cut JSON": {"kind": "truncated"},
    "nothing": {"kind": "empty"},
    "a drop": {"kind": "drop"},
    "a stall": {"kind": "stall"},
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_c14_memory_of_a_runtime_that_does_not_say_what_it_holds_is_neither_free_nor_taken_back(
    site: Site, host: Cards, fault: str
) -> None:
    """C14, BASTION 0.4.1: nothing is released, nothing that needs the memory starts, and the preview says why."""
    other = await with_neighbour(site, host)
    failing = other.ollama.faults["/api/ps"] = Fault(**FAULTS[fault])
    await site.heartbeat(lambda beat: any(row.runtime == "other" and not row.healthy for row in beat.runtimes), times=2)
    wanted = await site.submit(job("wants it", need={"vram_mb": 20_000}))
    await waits_for(site, wanted, Reason.CAPACITY)
    told = await preview(site, "--model", "m:8b", "--vram-mb", "20000", "--runtime", "ollama")
    await site.heartbeat(lambda beat: any(row.runtime == "other" for row in beat.runtimes), times=3)
    await site.watch.caught_up()
    admitted_early = site.watch.of_job(wanted, Admitted)
    released_early = site.watch.all(ReclaimRequested)
    del other.ollama.faults["/api/ps"]
    failing.released.set()
    await succeeds(site, wanted)

    assert (admitted_early, released_early) == ([], [])
    assert told["outcome"] == "denied"
    (place,) = told["places"]
    (stays,) = [each for each in place["stays"] if each["runtime"] == "other"]
    assert stays["kept"] in ("other_device", "activity_unknown")
    assert "nobody can tell" in stays["detail"]
    assert [fact.runtime for fact in site.watch.all(ReclaimRequested)] == ["other"]
    await other.ollama.__aexit__()
    await site.check()


# --- C35: a load is pinned to its job


async def test_c35_two_jobs_for_two_models_of_a_card_that_holds_one_both_succeed_with_a_load_each(
    site: Site, host: Cards
) -> None:
    """C35, llama.cpp#28698: one slot, the second job comes while the first one's model is loaded."""
    host.ollama.installed = {"a:14b": 15_000 * MB, "b:14b": 15_000 * MB}
    await begin(site, host)
    host.ollama.hold_load = asyncio.Event()
    first = await site.submit(job("first", "a:14b"))
    await until(lambda: host.ollama.load_calls == 1, "the first load has begun")
    second = await site.submit(job("second", "b:14b"))
    host.ollama.hold_load.set()
    host.ollama.hold_load = None
    await succeeds(site, first)
    await succeeds(site, second)

    assert (host.ollama.loads, host.ollama.unloads) == (2, 1)
    assert host.ollama.prompts == {"first": 1, "second": 1}
    order = [type(event.data) for event in site.watch.events]
    assert order.index(Succeeded) < order.index(ReclaimRequested)
    await site.check()


async def test_c35_with_two_slots_the_model_of_a_job_that_runs_is_not_taken_for_the_other(
    site: Site, host: Cards
) -> None:
    """C35: the second job waits for its memory until the first one's request has ended."""
    host.ollama.installed = {"a:14b": 15_000 * MB, "b:14b": 15_000 * MB}
    await begin(site, host, slots=2)
    host.ollama.hold = asyncio.Event()
    first = await site.submit(job("first", "a:14b"))
    await asked(host, "first")
    second = await site.submit(job("second", "b:14b"))
    why = await waits_for(site, second, Reason.DENIED)
    await site.heartbeat(lambda beat: bool(beat.claims), times=3)
    released_early = site.watch.all(ReclaimRequested)
    host.ollama.hold.set()
    host.ollama.hold = None
    await succeeds(site, first)
    await succeeds(site, second)

    assert "job(s) load or run there" in why
    assert released_early == []
    assert (host.ollama.loads, host.ollama.unloads) == (2, 1)
    await site.check()


@pytest.mark.parametrize("slots", [1, 2])
async def test_c35_a_router_that_holds_one_model_serves_two_jobs_for_two_with_a_load_each(
    site: Site, slots: int
) -> None:
    """C35, llama.cpp#28698: ``--models-max 1`` throws out whatever is idle, also what was just loaded for a job."""
    site.sections["agent"] |= {"find_devices": False}
    # On a GPU nobody would say where its models are: this one is for the CPU.
    site.devices = [{"id": "cpu", "source": "static", "kind": "cpu", "total_mb": 24_000, "slots": slots}]
    router = FakeLlamaRouter({"a": 1_000 * MB, "b": 1_000 * MB})
    router.models_max = 1
    router.count_prompts = True
    router.hold_load = asyncio.Event()
    async with router:
        site.served.append(Served("llama", "llamacpp", router, {"sole_client": True}))
        site.scheduler()
        site.agent()
        await site.ready()
        first = await site.submit(job("first", "a", need={"vram_mb": 1_000}))
        await until(lambda: router.children["a"].state == "loading", "the first load has begun")
        second = await site.submit(job("second", "b", need={"vram_mb": 1_000}))
        if slots == 2:
            await site.watch.fact(second, Admitted)
        router.hold_load.set()
        await succeeds(site, first)
        await succeeds(site, second)

        assert router.loads == 2
        assert router.prompts == {"first": 1, "second": 1}
        assert not site.watch.all(PlacementFailed)
        await site.check()


# --- load options are part of what is resident


async def test_jobs_with_the_same_load_options_share_a_load_and_one_with_others_loads_anew(
    site: Site, host: Cards
) -> None:
    await begin(site, host)
    ends = [
        await succeeds(site, await site.submit(job(name, options={"num_ctx": context})))
        for name, context in (("one", 4096), ("two", 4096), ("three", 8192))
    ]

    assert len(ends) == 3
    assert host.ollama.loads == 2
    options = [fact.load_options for fact in site.watch.all(ModelLoaded)]
    assert options == ['{"num_ctx":4096}', '{"num_ctx":8192}']
    assert [fact.resident for fact in site.watch.all(Admitted)] == [False, True, False]
    await site.check()


async def test_a_load_with_other_options_is_denied_while_a_job_uses_the_model(site: Site, host: Cards) -> None:
    """Ollama would replace the model, and the first job's next request would load it once more, unproven."""
    await begin(site, host, slots=2)
    host.ollama.hold = asyncio.Event()
    first = await site.submit(job("first", options={"num_ctx": 4096}))
    await asked(host, "first")
    second = await site.submit(job("second", options={"num_ctx": 8192}))
    denied = await site.watch.fact(second, Denied)
    loads_early = host.ollama.loads
    host.ollama.hold.set()
    host.ollama.hold = None
    await succeeds(site, first)
    await succeeds(site, second)

    assert denied.reason == Reason.OWNER_BUSY
    assert "a job of ours uses m:8b on ollama with other load options" in denied.detail
    assert (loads_early, host.ollama.loads) == (1, 2)
    await site.check()


# --- learned need


async def test_the_second_job_of_a_model_needs_what_the_first_one_was_measured_to_take(site: Site, host: Cards) -> None:
    await begin(site, host, residency="unload")
    for name in ("one", "two"):
        end = await succeeds(site, await site.submit(job(name)))
        await site.watch.until(
            lambda job=end.job: [fact for fact in site.watch.all(ModelUnloaded) if fact.job == job], "it is unloaded"
        )

    first, second = site.watch.all(Admitted)
    assert (first.need_source, first.need_mb) == ("reported", M_MB)
    assert (second.need_source, second.need_mb) == ("learned", 4_899 + 490)
    assert [fact.vram_mb for fact in site.watch.all(ModelLoaded)] == [4_899, 4_899]
    await site.check()


# --- residency policies


@pytest.mark.parametrize("by", ["runtime", "job"])
async def test_a_model_is_unloaded_after_the_job_where_the_policy_says_so(site: Site, host: Cards, by: str) -> None:
    await begin(site, host, residency="unload" if by == "runtime" else "pin")
    fields: dict[str, Any] = {} if by == "runtime" else {"residency": "unload"}
    done = await site.submit(job("one", **fields))
    await succeeds(site, done)
    (unloaded,) = await site.watch.until(lambda: site.watch.all(ModelUnloaded), "it is unloaded")

    assert (unloaded.model, unloaded.why, unloaded.job) == ("m:8b", "policy", done)
    assert host.ollama.loaded == {}
    assert not site.watch.all(Pinned)
    await site.check()


@pytest.mark.parametrize("by", ["runtime", "job"])
async def test_a_pinned_model_stays_though_others_want_its_memory(site: Site, host: Cards, by: str) -> None:
    host.ollama.installed = {"a:14b": 15_000 * MB, "b:14b": 15_000 * MB}
    await begin(site, host, residency="pin" if by == "runtime" else "unload")
    fields: dict[str, Any] = {} if by == "runtime" else {"residency": "pin"}
    done = await site.submit(job("one", "a:14b", **fields))
    await succeeds(site, done)
    (pinned,) = await site.watch.until(lambda: site.watch.all(Pinned), "it is pinned")
    wanted = await site.submit(job("two", "b:14b", need={"vram_mb": 15_000}, on_capacity="reject"))
    end = await site.watch.end(wanted)
    # What its own job says does not count against a pin.
    await succeeds(site, await site.submit(job("three", "a:14b", residency="unload")))

    assert (pinned.model, pinned.job) == ("a:14b", done)
    assert "pinned" in str(end)
    assert list(host.ollama.loaded) == ["a:14b"]
    assert host.ollama.loaded["a:14b"].keep.days > 365
    assert not site.watch.all(ModelUnloaded)
    await site.check()


async def test_a_model_is_kept_by_default_and_no_event_says_otherwise(site: Site, host: Cards) -> None:
    await begin(site, host, residency="unload")
    await succeeds(site, await site.submit(job("one", residency="keep")))
    await succeeds(site, await site.submit(job("two", residency="keep")))

    assert host.ollama.loads == 1
    assert not site.watch.all(ModelUnloaded)
    assert not site.watch.all(Pinned)
    await site.check()


# --- models that are missing


async def test_a_missing_model_is_fetched_once_for_two_jobs_that_declare_no_need(site: Site, host: Cards) -> None:
    """What it takes is known only once it is there: the need is decided after the fetch, and before any load."""
    site.sections["agent"] |= {"pull_leaves_disk_mb": 1}
    await begin(site, host, slots=2, pull=["small:*"])
    host.ollama.library = {"small:1b": 700 * MB}
    host.ollama.hold_pull = asyncio.Event()
    first, second = [await site.submit(job(name, "small:1b")) for name in ("first", "second")]
    await site.watch.until(lambda: site.watch.all(ProvisionProgress), "its progress is told")
    await site.heartbeat(lambda beat: [claim.phase for claim in beat.claims] == ["provisioning"] * 2)
    admitted_early = site.watch.all(Admitted)
    host.ollama.hold_pull.set()
    await succeeds(site, first)
    await succeeds(site, second)

    assert admitted_early == []
    assert (host.ollama.pulls, host.ollama.loads) == (1, 1)
    assert len(site.watch.all(ProvisionStarted)) == len(site.watch.all(Provisioned)) == 1
    assert site.watch.all(ProvisionProgress)[0].status == "pulling manifest"
    assert {(fact.need_source, fact.need_mb) for fact in site.watch.all(Admitted) if not fact.resident} == {
        ("reported", 700)
    }
    assert not site.watch.all(Denied)
    await site.check()


async def test_a_fetch_that_fails_fails_its_job_in_the_runtimes_own_words_and_gives_its_slot_back(
    site: Site, host: Cards
) -> None:
    site.sections["agent"] |= {"pull_leaves_disk_mb": 1}
    await begin(site, host, pull=["small:*"])
    host.ollama.pull_error = "max retries exceeded: EOF"
    end = await site.run(job("one", "small:1b"))
    await succeeds(site, await site.submit(job("two")))

    assert isinstance(end, Failed)
    assert end.reason == Reason.PROVISION_FAILED
    assert "max retries exceeded: EOF" in end.detail
    (failed,) = site.watch.all(ProvisionFailed)
    assert "max retries exceeded: EOF" in failed.detail
    assert host.ollama.prompts == {"two": 1}
    await site.check()


async def test_a_model_is_not_fetched_onto_a_disk_that_would_be_too_full(site: Site, host: Cards) -> None:
    site.sections["agent"] |= {"pull_leaves_disk_mb": 1_000_000_000}
    await begin(site, host, pull=["small:*"], models_folder=str(site.folder))
    end = await site.run(job("one", "small:1b"))

    assert isinstance(end, Failed)
    assert end.reason == Reason.PROVISION_FAILED
    assert "where 1000000000 MB must stay free" in end.detail
    assert host.ollama.pulls == 0
    await site.check()


async def test_a_model_that_nobody_may_fetch_is_refused_in_words(site: Site, host: Cards) -> None:
    await begin(site, host, pull=["big:*"])
    refused = await site.watch.answer(await site.send(job("one", "small:1b")))

    assert isinstance(refused, Rejected)
    assert "no runtime has it or may fetch it" in refused.problems[0].message
    assert host.ollama.pulls == 0
    await site.check()


async def test_a_job_that_is_cancelled_while_its_model_is_fetched_ends_at_once_and_the_fetch_is_given_up(
    site: Site, host: Cards
) -> None:
    site.sections["agent"] |= {"pull_leaves_disk_mb": 1}
    await begin(site, host, pull=["small:*"])
    host.ollama.hold_pull = asyncio.Event()
    made = await site.submit(job("one", "small:1b"))
    await site.heartbeat(lambda beat: any(claim.phase == "provisioning" for claim in beat.claims))
    await site.command("cancel", made)
    end = await site.watch.end(made)
    (failed,) = await site.watch.until(lambda: site.watch.all(ProvisionFailed), "the fetch is given up")
    await succeeds(site, await site.submit(job("two")))

    assert isinstance(end, Cancelled)
    assert "nobody waits for it" in failed.detail
    assert host.ollama.pulls_aborted == 1
    assert site.watch.of_job(made, Admitted) == []
    await site.check()


async def test_a_missing_model_that_could_not_be_admitted_is_not_fetched(site: Site, host: Cards) -> None:
    """A need that is known and has no room is refused before anything is fetched for it."""
    site.sections["agent"] |= {"pull_leaves_disk_mb": 1, "heartbeat_s": 60, "idle_grace_s": 300}
    site.sections["scheduler"] |= {"claim_ttl_s": 300}
    await begin(site, host, pull=["small:*"])
    await site.heartbeat(lambda beat: beat.host == HOST, times=2)
    host.gpu(A).memory = (TOTAL_MB, 1_000)
    host.show()
    made = await site.submit(job("one", "small:1b", need={"vram_mb": 2_000}))
    denied = await site.watch.fact(made, Denied)

    assert denied.reason == Reason.INSUFFICIENT
    assert host.ollama.pulls == 0
    await site.check()


# --- refuse rather than spill


async def test_a_model_that_would_spill_is_refused_where_the_host_asks_for_that(site: Site, host: Cards) -> None:
    host.ollama.vram_room = 3_000 * MB
    await begin(site, host, refuse_spill=True)
    end = await site.run(job("one", need={"vram_mb": 2_000}))

    assert isinstance(end, Failed)
    assert end.reason == Reason.LOAD_FAILED
    assert "out of memory" in end.detail
    assert "refuse_spill" in end.detail
    assert (host.ollama.loads, dict(host.ollama.prompts)) == (0, {})
    assert not site.watch.all(Suspect)
    await site.check()


async def test_a_model_that_somebody_else_loaded_is_taken_as_it_is_where_spills_are_refused(
    site: Site, host: Cards
) -> None:
    """A request that names another number of layers would load it once more, after its place was proven."""
    await begin(site, host, refuse_spill=True)
    await foreign_load(host)
    done = await site.submit(job("one"))
    await succeeds(site, done)

    assert host.ollama.loads == 1
    assert len(site.watch.of_job(done, PlacementVerified)) == 1
    await site.check()


async def foreign_load(host: Cards) -> None:
    """Somebody else has the Ollama load the model."""
    body = {"model": "m:8b", "stream": False}
    async with (
        aiohttp.ClientSession(trust_env=False) as client,
        client.post(f"{host.ollama.url}/api/generate", json=body) as answer,
    ):
        assert answer.status == 200


# --- after long runs


async def test_a_model_that_left_vram_during_a_long_run_makes_its_runtime_suspect_and_not_its_job(
    site: Site, host: Cards
) -> None:
    site.sections["agent"] |= {"recheck_after_s": 0.001}
    await begin(site, host)
    host.ollama.hold = asyncio.Event()
    done = await site.submit(job("one"))
    await asked(host, "one")
    held = host.ollama.loaded["m:8b"]
    whole, held.vram = held.vram, held.vram // 2
    host.ollama.hold.set()
    host.ollama.hold = None
    await succeeds(site, done)
    (suspect,) = await site.watch.until(lambda: site.watch.all(Suspect), "its runtime is suspect")
    waiting = await site.submit(job("two"))
    why = await waits_for(site, waiting, Reason.NO_ROUTE)
    held.vram = whole
    await succeeds(site, waiting)

    assert (suspect.reason, suspect.job, suspect.model) == (Reason.CPU_FALLBACK, done, "m:8b")
    assert suspect.detail.startswith("after a run of ")
    assert "50.0% of m:8b is in VRAM" in suspect.detail
    assert "is suspect: cpu_fallback" in why
    assert not site.watch.all(PlacementFailed)
    assert site.watch.history(done)[-1] == "succeeded"
    await site.check()
