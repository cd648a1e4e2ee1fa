"""What only the whole site shows to be wrong with the hosts' registries."""

from __future__ import annotations

import pytest

from gpukeeper.events.host import Joined, Left
from gpukeeper.events.runtime import Registered
from gpukeeper.projections.registries import registry_problems
from support.history import History

URL = "http://gpu-server:11434"


def joins(h: History, host: str, *, url: str = URL, runtime: str = "ollama", devices: tuple[str, ...] = ()) -> None:
    """A host joins with one device ``g0`` and one runtime."""
    h.fact(
        Registered(host=host, runtime=runtime, provider="ollama", url=url, devices=devices, loads_models=True),
    )
    h.fact(
        Joined(
            host=host,
            boot_id="boot",
            instance_id=f"{host}-1",
            version="1",
            pid=1,
            devices=("g0",),
            runtimes=(runtime,),
        )
    )


@pytest.mark.parametrize("other", [URL, "http://GPU-server:11434/v1/"])
def test_one_server_in_the_registries_of_two_hosts_is_told_with_both(other: str) -> None:
    h = History()
    joins(h, "a")
    joins(h, "b", url=other, runtime="theirs")

    (told,) = registry_problems(h.site)

    assert told.startswith("runtime b/theirs is the server of a/ollama, ")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("http://127.0.0.1:11434", "http://localhost:11434", id="each on its own machine"),
        pytest.param(URL, "http://gpu-server:11435", id="two ports"),
        pytest.param("", "", id="reached through containers"),
    ],
)
def test_two_servers_are_no_problem(first: str, second: str) -> None:
    h = History()
    joins(h, "a", url=first)
    joins(h, "b", url=second)

    assert registry_problems(h.site) == ()


def test_the_problem_ends_when_one_of_the_agents_leaves() -> None:
    h = History()
    joins(h, "a")
    joins(h, "b")
    h.fact(Left(host="b", instance_id="b-1"))

    assert registry_problems(h.site) == ()


def test_a_runtime_that_names_a_device_that_is_not_there_is_told() -> None:
    h = History()
    joins(h, "a", devices=("g0", "GPU-gone"))

    (told,) = registry_problems(h.site)

    assert told == "runtime a/ollama names devices that are not there: GPU-gone; there: g0"
