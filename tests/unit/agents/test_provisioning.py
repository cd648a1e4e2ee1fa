"""Fetching what is missing: once for all who wait, bounded, and told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from gpukeeper.agents.config import RuntimeConfig
from gpukeeper.agents.disk import free_disk_mb, models_folder
from gpukeeper.agents.provisioning import Provisioner
from gpukeeper.agents.runtimes.ollama import Ollama
from gpukeeper.agents.runtimes.port import PullProgress, RuntimeFailure
from gpukeeper.agents.writer import NotRecorded
from gpukeeper.events import subjects
from gpukeeper.events.fact import Fact
from gpukeeper.events.readings import RuntimeReading
from gpukeeper.events.reasons import Reason
from gpukeeper.events.runtime import Provisioned, ProvisionFailed, ProvisionProgress, ProvisionStarted
from support.bench import Bench
from support.ollama import DISK_FULL, FakeOllama
from support.rig import HOST, Rig, rig
from support.scripted import MB, Card, Runtime
from support.virtual_time import in_virtual_time

F = TypeVar("F", bound=Fact)
GONE = "was given up: nobody waits for it"


class Fetching(Runtime):
    """A runtime that can fetch, at ten steps a second."""

    pulls = True

    def __init__(self, card: Card, *, pull: tuple[str, ...] = ("*",), name: str = "ollama") -> None:
        super().__init__(card, pull=pull, name=name)
        self.models = ("m",)
        self.size_mb_to_pull = 100
        #: Seconds that a fetch takes, in tenths.
        self.pull_s = 10.0
        self.pull_failure: Exception | None = None
        self.pulled: list[str] = []
        self.pulling = 0
        self.pulling_max = 0
        self.cut_at_s: list[float] = []
        #: How long the next looks take; each shows what was there when it began.
        self.looks_s: list[float] = []

    async def look(self) -> RuntimeReading:
        models = self.models
        await asyncio.sleep(self.looks_s.pop(0) if self.looks_s else 0.0)
        return msgspec.structs.replace(await super().look(), models=models)

    async def pull(self, model: str) -> AsyncGenerator[PullProgress]:
        self.pulled.append(model)
        self.pulling += 1
        self.pulling_max = max(self.pulling, self.pulling_max)
        total = self.size_mb_to_pull * MB
        finished = False
        try:
            yield PullProgress(status="pulling manifest")
            steps = int(self.pull_s * 10)
            for step in range(1, steps + 1):
                await asyncio.sleep(0.1)
                yield PullProgress(status="pulling a", completed_bytes=total * step // steps, total_bytes=total)
            if self.pull_failure is not None:
                raise self.pull_failure
            self.models = (*(self.models or ()), model)
            finished = True
            yield PullProgress(status="success")
        finally:
            self.pulling -= 1
            if not finished:
                self.cut_at_s.append(asyncio.get_running_loop().time())


class Fetches(Bench):
    """A bench with somebody who fetches. Make it inside a running loop."""

    def __init__(self, *, pull: tuple[str, ...] = ("*",), free_mb: int | None = 100_000) -> None:
        super().__init__()
        self.runtime = self.fetching = Fetching(self.card, pull=pull)
        self.free_mb = free_mb
        self.provisioner = Provisioner(self.room, leaves_mb=10_000, free_disk=self._free)

    async def _free(self, config: RuntimeConfig) -> int | None:
        return self.free_mb

    def ensure(self, model: str = "big:70b", job: str = "a", *, within_s: float = 600.0) -> asyncio.Task[bool]:
        until = asyncio.get_running_loop().time() + within_s
        return asyncio.create_task(self.provisioner.ensure(self.fetching, model, job, until))

    async def failure(self, waiting: asyncio.Task[bool]) -> RuntimeFailure:
        with pytest.raises(RuntimeFailure) as caught:
            await waiting
        return caught.value

    async def runtime_facts(self, kind: type[F]) -> list[F]:
        return [fact for fact in await self.facts(subjects.runtime("h1", "ollama")) if isinstance(fact, kind)]


# --- what needs no fetch


@in_virtual_time
async def test_a_model_that_is_there_is_not_fetched_and_nothing_is_told() -> None:
    bench = Fetches()

    assert [await bench.ensure("m"), await bench.ensure("m:latest")] == [False, False]
    assert (bench.fetching.pulled, await bench.runtime_told()) == ([], [])


@in_virtual_time
async def test_a_runtime_that_does_not_say_what_it_has_is_left_to_its_load() -> None:
    bench = Fetches()
    bench.fetching.models = None

    assert await bench.ensure() is False
    assert not bench.fetching.pulled


@in_virtual_time
async def test_a_runtime_that_cannot_fetch_is_not_even_looked_at() -> None:
    bench = Bench()
    provisioner = Provisioner(bench.room, leaves_mb=0)

    assert await provisioner.ensure(bench.runtime, "big:70b", "a", bench.now_s + 1) is False
    assert bench.runtime.looks == 0


# --- what is refused


@in_virtual_time
async def test_a_model_on_no_list_is_missing_and_nothing_is_fetched() -> None:
    bench = Fetches(pull=("qwen3:*",))

    failure = await bench.failure(bench.ensure())

    assert failure.reason is Reason.MODEL_MISSING
    assert "big:70b" in failure.detail
    assert (bench.fetching.pulled, await bench.runtime_told()) == ([], [])


@pytest.mark.parametrize("free_mb", [9_999, None])
def test_a_disk_without_room_or_that_nobody_can_read_is_refused(free_mb: int | None) -> None:
    @in_virtual_time
    async def go() -> None:
        bench = Fetches(free_mb=free_mb)

        failure = await bench.failure(bench.ensure())

        assert failure.reason is Reason.PROVISION_FAILED
        assert not bench.fetching.pulled

    go()


@in_virtual_time
async def test_a_fetch_that_turns_out_too_large_is_stopped_with_its_figures() -> None:
    bench = Fetches(free_mb=10_050)

    failure = await bench.failure(bench.ensure())

    assert failure.reason is Reason.PROVISION_FAILED
    assert "10050 MB of the disk are free and" in failure.detail
    (told,) = await bench.runtime_facts(ProvisionFailed)
    assert (told.reason, told.detail) == (failure.reason, failure.detail)
    assert bench.fetching.cut_at_s[0] < 1.0
    assert "big:70b" not in (bench.fetching.models or ())


@in_virtual_time
async def test_a_disk_that_others_fill_meanwhile_stops_the_fetch() -> None:
    bench = Fetches()
    waiting = bench.ensure()
    await asyncio.sleep(2)
    bench.free_mb = 10_010

    failure = await bench.failure(waiting)

    assert "must stay free" in failure.detail
    assert bench.now_s < 10


# --- one fetch


@in_virtual_time
async def test_a_missing_model_is_fetched_and_its_beginning_and_end_are_told() -> None:
    bench = Fetches()

    assert await bench.ensure() is True

    told = await bench.facts(subjects.runtime("h1", "ollama"))
    assert told[0] == ProvisionStarted(host="h1", runtime="ollama", model="big:70b", job="a")
    end = told[-1]
    assert isinstance(end, Provisioned)
    assert (end.runtime, end.model, end.job, round(end.took_s)) == ("ollama", "big:70b", "a", 10)
    assert await bench.ensure() is False


@in_virtual_time
async def test_progress_is_told_at_a_bounded_rate_with_what_is_known() -> None:
    bench = Fetches()
    bench.fetching.pull_s = 60.0

    await bench.ensure()

    progress = await bench.runtime_facts(ProvisionProgress)
    assert 10 <= len(progress) <= 13
    assert (progress[0].status, progress[0].total_bytes) == ("pulling manifest", None)
    done = [one.completed_bytes for one in progress[1:]]
    assert done == sorted(done, key=lambda each: each or 0)
    assert {one.total_bytes for one in progress[1:]} == {100 * MB}


@in_virtual_time
async def test_a_log_that_is_away_does_not_hold_up_the_runtime() -> None:
    bench = Fetches()
    waiting = bench.ensure()
    await asyncio.sleep(1)
    bench.log.go_away(30)
    await asyncio.sleep(12)
    fetched = "big:70b" in (bench.fetching.models or ())

    assert fetched
    assert not waiting.done()
    assert await waiting is True
    assert (await bench.runtime_told())[-1] == "Provisioned"


@in_virtual_time
async def test_the_runtimes_words_are_kept_and_the_next_job_may_try_again() -> None:
    bench = Fetches()
    bench.fetching.pull_failure = RuntimeFailure(Reason.PROVISION_FAILED, "no space left on device")

    failure = await bench.failure(bench.ensure())
    bench.fetching.pull_failure = None
    again = await bench.ensure(job="b")

    (told,) = await bench.runtime_facts(ProvisionFailed)
    assert (failure.reason, failure.detail) == (told.reason, told.detail)
    assert told.detail == "no space left on device"
    assert again is True
    assert [one.job for one in await bench.runtime_facts(ProvisionStarted)] == ["a", "b"]


# --- many who wait


@in_virtual_time
async def test_all_who_wait_share_one_fetch() -> None:
    bench = Fetches()
    waiting = [bench.ensure(job=f"j{number}") for number in range(5)]
    await asyncio.sleep(3)
    waiting += [bench.ensure("big:70b", job=f"late{number}") for number in range(5)]

    assert await asyncio.gather(*waiting) == [True] * 10
    assert bench.fetching.pulled == ["big:70b"]
    assert (await bench.runtime_told()).count("Provisioned") == 1


@in_virtual_time
async def test_names_of_one_model_are_one_fetch_and_two_models_are_two() -> None:
    bench = Fetches()

    await asyncio.gather(bench.ensure("q"), bench.ensure("q:latest"), bench.ensure("other"))

    assert sorted(bench.fetching.pulled) == ["other", "q"]


@in_virtual_time
async def test_all_who_wait_hear_of_the_failure() -> None:
    bench = Fetches()
    bench.fetching.pull_failure = RuntimeFailure(Reason.PROVISION_FAILED, "boom")
    waiting = [bench.ensure(job=f"j{number}") for number in range(3)]

    failures = [await bench.failure(one) for one in waiting]

    assert [one.detail for one in failures] == ["boom"] * 3
    assert len({id(one) for one in failures}) == 3
    assert len(bench.fetching.pulled) == 1


@in_virtual_time
async def test_c10_when_the_first_who_waits_goes_the_fetch_goes_on_for_the_others() -> None:
    bench = Fetches()
    first = bench.ensure(job="first")
    await asyncio.sleep(1)
    second = bench.ensure(job="second")
    await asyncio.sleep(1)
    first.cancel()

    assert await second is True
    assert first.cancelled()
    assert bench.fetching.pulled == ["big:70b"]
    assert not await bench.runtime_facts(ProvisionFailed)


@in_virtual_time
async def test_when_the_last_who_waits_goes_the_runtime_is_told_to_stop() -> None:
    bench = Fetches()
    waiting = bench.ensure()
    await asyncio.sleep(1)
    waiting.cancel()
    await asyncio.sleep(1)

    assert bench.fetching.cut_at_s == [pytest.approx(1.0, abs=0.1)]
    (told,) = await bench.runtime_facts(ProvisionFailed)
    assert GONE in told.detail


@in_virtual_time
async def test_a_clock_that_runs_out_ends_the_wait_of_that_job_only() -> None:
    bench = Fetches()
    short, long = bench.ensure(job="short", within_s=3), bench.ensure(job="long", within_s=30)

    with pytest.raises(TimeoutError):
        await short
    at_s = bench.now_s

    assert at_s == pytest.approx(3.0, abs=0.1)
    assert await long is True


@in_virtual_time
async def test_a_fetch_that_hangs_ends_with_the_last_clock() -> None:
    bench = Fetches()
    bench.fetching.pull_s = 100_000

    with pytest.raises(TimeoutError):
        await bench.ensure(within_s=60)
    await asyncio.sleep(1)

    assert bench.now_s == pytest.approx(61.0, abs=0.1)
    assert (await bench.runtime_told())[-1] == "ProvisionFailed"
    assert bench.fetching.pulling == 0


@in_virtual_time
async def test_who_comes_while_a_fetch_is_given_up_gets_one_of_their_own_after_it() -> None:
    bench = Fetches()
    first = bench.ensure(job="first")
    await asyncio.sleep(1)
    bench.log.go_away(5)
    first.cancel()
    await asyncio.sleep(0.5)
    second = bench.ensure(job="second")

    assert await second is True
    assert bench.fetching.pulled == ["big:70b", "big:70b"]
    assert bench.fetching.pulling_max == 1
    assert [one.job for one in await bench.runtime_facts(Provisioned)] == ["second"]


@in_virtual_time
async def test_a_look_from_before_the_end_of_a_fetch_begins_no_second_one() -> None:
    bench = Fetches()
    bench.fetching.pull_s = 1.0
    bench.fetching.looks_s = [5.0]
    slow = bench.ensure(job="slow")
    await asyncio.sleep(1)
    quick = bench.ensure(job="quick")

    assert [await quick, await slow] == [True, False]
    assert bench.fetching.pulled == ["big:70b"]


@in_virtual_time
async def test_closing_ends_every_fetch_and_tells_who_waits() -> None:
    bench = Fetches()
    waiting = [bench.ensure("x"), bench.ensure("y")]
    await asyncio.sleep(1)

    await bench.provisioner.close()

    assert [GONE in (await bench.failure(one)).detail for one in waiting] == [True, True]
    assert bench.fetching.pulling == 0
    assert (await bench.runtime_told()).count("ProvisionFailed") == 2


# --- with the real parts


async def ensured(made: Rig, fake: FakeOllama, provisioner: Provisioner, *, folder: Path) -> bool:
    config = RuntimeConfig(name="o", provider="ollama", url=fake.url, pull=("small:*",), models_folder=str(folder))
    provider = Ollama(config)
    try:
        return await provisioner.ensure(provider, "small:1b", "a", asyncio.get_running_loop().time() + 20)
    finally:
        await provider.close()


async def test_an_ollama_on_a_real_disk_fetches_what_is_missing(tmp_path: Path) -> None:
    async with FakeOllama() as fake, rig() as made:
        fetched = await ensured(made, fake, Provisioner(made.room, leaves_mb=0), folder=tmp_path / "not" / "yet")

        assert fetched is True
        assert "small:1b" in fake.installed
        told = await made.until(Provisioned)
        assert (told.host, told.runtime, told.model) == (HOST, "o", "small:1b")


async def test_the_words_of_an_ollama_whose_disk_is_full_are_kept(tmp_path: Path) -> None:
    async with FakeOllama() as fake, rig() as made:
        fake.pull_error = DISK_FULL
        with pytest.raises(RuntimeFailure) as caught:
            await ensured(made, fake, Provisioner(made.room, leaves_mb=0), folder=tmp_path)

        assert DISK_FULL in caught.value.detail
        assert DISK_FULL in (await made.until(ProvisionFailed)).detail


async def test_more_than_a_real_disk_has_is_refused(tmp_path: Path) -> None:
    async with FakeOllama() as fake, rig() as made:
        with pytest.raises(RuntimeFailure) as caught:
            await ensured(made, fake, Provisioner(made.room, leaves_mb=2**50), folder=tmp_path)

        assert "must stay free" in caught.value.detail
        assert fake.pulls == 0


async def test_events_that_the_log_refuses_for_good_end_the_wait(tmp_path: Path) -> None:
    async with FakeOllama() as fake, rig() as made:
        made.log.refused.add(subjects.runtime(HOST, "o"))
        with pytest.raises(NotRecorded):
            await ensured(made, fake, Provisioner(made.room, leaves_mb=0), folder=tmp_path)

        assert fake.pulls == 0


# --- the disk


def test_the_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    config = RuntimeConfig(name="o", provider="ollama", url="http://x", models_folder=str(tmp_path / "a" / "b"))

    assert (free_disk_mb(config) or 0) > 0


def test_a_folder_that_cannot_be_looked_at_has_unknown_room(tmp_path: Path) -> None:
    config = RuntimeConfig(name="o", provider="ollama", url="http://x", models_folder=f"{tmp_path}/{'x' * 300}")

    assert free_disk_mb(config) is None


def test_where_nothing_is_configured_an_ollamas_own_setting_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RuntimeConfig(name="o", provider="ollama", url="http://x")
    monkeypatch.setenv("OLLAMA_MODELS", "/srv/models")
    told = models_folder(config)
    monkeypatch.delenv("OLLAMA_MODELS")

    assert told == Path("/srv/models")
    assert models_folder(config).parts[-2:] == (".ollama", "models")
