"""Registries that cannot be meant: refused at the start with the place and the reason, or told while the rest works."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.events.host import Joined
from gpukeeper.events.job import Admitted, Succeeded
from gpukeeper.events.reasons import Reason
from support.card_site import CARD, begin, job, ollama, waits
from support.llamacpp_fake import FakeLlamaCpp
from support.nats import NatsServer
from support.ollama import FakeOllama
from support.operators import gpuq, gpuq_with
from support.shared_cards import SharedCards
from support.site import HOST, Served, Site, site_in

pytestmark = pytest.mark.processes
pytest_plugins = ["support.nvml_fixture", "support.card_fixture"]

NOWHERE = "GPU-nowhere0-0000-0000-0000-000000000009"


def entry(name: str, url: str = "http://127.0.0.1:9", **fields: str) -> str:
    """One runtime of a configuration; fields as TOML has them."""
    made = {"name": f'"{name}"', "provider": '"ollama"', "url": f'"{url}"', **fields}
    return "[[runtimes]]\n" + "".join(f"{key} = {value}\n" for key, value in made.items())


def device(device_id: str, **fields: str) -> str:
    made = {"id": f'"{device_id}"', **fields}
    return "[[devices]]\n" + "".join(f"{key} = {value}\n" for key, value in made.items())


#: What is wrong -> (the configuration, what is said of it).
BAD: dict[str, tuple[str, str]] = {
    "two of one name": (entry("a") + entry("a", "http://127.0.0.1:10"), r'runtimes\[1\]\.name = "a": must be'),
    "two of one URL": (entry("a") + entry("b"), r'runtimes\[1\]\.url = "http://127\.0\.0\.1:9": .* runtime a'),
    "two of one port": (
        entry("a") + entry("b", "http://localhost:9/v1"),
        r'runtimes\[1\]\.url = "http://localhost:9/v1": must be another host or port than that of runtime a',
    ),
    "a URL that is none": (entry("a", "gpu-server"), r'runtimes\[0\]\.url = "gpu-server": must be a URL such as'),
    "no URL": (entry("a", ""), r'runtimes\[0\]\.url = "": must be a URL such as'),
    "a port that is none": (entry("a", "http://a:99999"), r'runtimes\[0\]\.url = "http://a:99999": must be a URL'),
    "an unknown provider": (
        entry("a", provider='"olama"'),
        r'runtimes\[0\]\.provider = "olama": must be one of .*"ollama"',
    ),
    "negative memory": (device("c", total_mb="-1"), r"devices\[0\]\.total_mb = -1: "),
    "no memory": (device("c", source='"static"', kind='"gpu"', total_mb="0"), r"devices\[0\]\.total_mb = 0: "),
    "absurd memory": (device("c", total_mb="10000000000"), r"devices\[0\]\.total_mb = 10000000000: "),
    "memory in words": (device("c", total_mb='"24 GB"'), r'devices\[0\]\.total_mb = "24 GB": expected integer'),
    "all of it kept back": (
        device("c", total_mb="100", headroom_mb="100"),
        r"devices\[0\]\.headroom_mb = 100: must be less than its total_mb",
    ),
    "a model larger than its device": (
        device("c", total_mb="100") + entry("a", provider='"vllm"', holds_mb="101", devices='["c"]'),
        r"runtimes\[0\]\.holds_mb = 101: must be at most 100",
    ),
    "a device that is not declared": (
        "[agent]\nfind_devices = false\n" + entry("a", devices='["c"]'),
        r'runtimes\[0\]\.devices = "c": must be the id of a declared device',
    ),
    "two devices of one id": (device("c") + device("c"), r'devices\[1\]\.id = "c": must be'),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_registry_that_cannot_be_meant_is_refused_at_the_start_with_its_place(
    tmp_path: Path, what: str
) -> None:
    text, words = BAD[what]
    config = tmp_path / "gpuq.toml"
    config.write_text(text)
    said = await gpuq_with(config, tmp_path / "data", "agent")

    assert said.code == Exit.MISCONFIGURED
    # As the line of a log has it.
    told = said.err.replace('\\"', '"')
    assert re.search(words, told), told
    assert str(config) in told
    assert "Traceback" not in said.err


@pytest.fixture
async def plain(tmp_path: Path, nats_server: NatsServer) -> AsyncIterator[Site]:
    async with site_in(tmp_path, nats_server.settings()) as site:
        site.devices = [{"id": "cpu0", "source": "static", "kind": "cpu", "total_mb": 24_000}]
        yield site


async def test_a_device_that_is_not_there_is_told_and_the_others_work(site: Site, card: SharedCards) -> None:
    site.devices = [{"id": NOWHERE, "source": "nvml"}]
    async with ollama(site, card), FakeOllama({"lost:1b": 1_000_000}) as lost:
        site.served[0].settings["devices"] = [CARD]
        site.served.append(Served("lost", "ollama", lost, {"devices": ["GPU-typo", NOWHERE]}))
        await begin(site)
        end = await site.run(job("goes on", 6_000))
        waiting = await site.submit(job("waits", 1, model="lost:1b"))
        await waits(site, waiting, Reason.NO_ROUTE)
        agent = next(part for part in site.parts if part.name == "agent")
        await site.said(agent, "GPU-typo")
        shown = await gpuq(site, "devices", "--json")
        table = await gpuq(site, "devices")
        doctor = await gpuq(site, "doctor", "--json")

    assert isinstance(end, Succeeded)
    assert [fact.device for fact in site.watch.all(Admitted)] == [CARD]
    (problem,) = shown.document["problems"]
    assert problem.startswith(f"runtime {HOST}/lost names devices that are not there: GPU-typo; there: ")
    assert problem in table.out
    states = {each["device"]: each["state"] for each in shown.document["hosts"][0]["devices"]}
    assert states == {NOWHERE: "lost", CARD: "healthy"}
    told = [check["detail"] for check in doctor.document["checks"] if check["name"] == "devices" and not check["ok"]]
    assert "runtime lost may use GPU-typo: this host has no such device" in told
    assert any(each.startswith(NOWHERE) for each in told)


async def test_a_runtime_that_two_hosts_list_is_told_and_the_others_work(plain: Site) -> None:
    async with FakeLlamaCpp() as llama:
        llama.count_prompts = True
        plain.served.append(Served("llama", "llamacpp", llama))
        plain.extra_runtimes.append({"name": "shared", "provider": "ollama", "url": "http://gpu-server.invalid:11434"})
        scheduler = plain.scheduler()
        plain.agent()
        plain.agent("second", host="second")
        await plain.watch.until(lambda: len(plain.watch.all(Joined)) == 2, "both hosts have joined")
        await plain.said(scheduler, "registry_problems")
        end = await plain.run({"model": "fake", "prompt": "goes on"})
        shown = await gpuq(plain, "devices", "--json")

    assert isinstance(end, Succeeded)
    (problem,) = shown.document["problems"]
    assert problem.startswith(f"runtime second/shared is the server of {HOST}/shared, http://gpu-server.invalid:11434")
    assert problem in scheduler.log
    assert scheduler.log.count("registry_problems") == 1, "it is logged once"
    assert scheduler.running
