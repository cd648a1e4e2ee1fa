"""Names of devices and runtimes as people type them, and the commands made of them."""

from __future__ import annotations

import pytest

from gpukeeper.cli.errors import WrongUsage
from gpukeeper.cli.orders import order
from gpukeeper.cli.placenames import host_and_device
from gpukeeper.events import operator
from gpukeeper.events.errors import InvalidId


@pytest.mark.parametrize("words", [("box", "gpu0"), ("box/gpu0",)])
def test_a_device_is_named_with_or_without_a_slash(words: tuple[str, ...]) -> None:
    wanted = order("drain", words, reason="new fan")

    assert wanted.fact == operator.Drain(host="box", device="gpu0", reason="new fan")
    assert (wanted.what, wanted.on_device) == ("drain box/gpu0", True)


@pytest.mark.parametrize("words", [("box", "ollama", "hf.co/a/b:q4"), ("box/ollama", "hf.co/a/b:q4")])
def test_a_model_may_hold_a_slash_of_its_own(words: tuple[str, ...]) -> None:
    assert order("pin", words).fact == operator.Pin(host="box", runtime="ollama", model="hf.co/a/b:q4")


def test_a_pin_without_a_model_is_of_all_that_the_runtime_holds() -> None:
    assert order("unpin", ("box/ollama",)).fact == operator.Unpin(host="box", runtime="ollama")


def test_a_reclaim_carries_what_it_is_narrowed_to() -> None:
    wanted = order("reclaim", ("box/gpu0",), runtime="ollama", model="m", vram_mb=9)

    assert wanted.fact == operator.Reclaim(host="box", device="gpu0", runtime="ollama", model="m", vram_mb=9)


@pytest.mark.parametrize("words", [(), ("box",), ("box", "gpu0", "more"), ("box/gpu0", "more")])
def test_too_few_and_too_many_names_are_wrong_usage(words: tuple[str, ...]) -> None:
    with pytest.raises(WrongUsage, match="HOST DEVICE, or HOST/DEVICE"):
        order("drain", words)


@pytest.mark.parametrize("words", [("box", "gpu.0"), ("*", "gpu0"), ("box/", "gpu0"), ("box/gpu0/x",)])
def test_what_can_be_no_name_is_refused_before_anything_is_sent(words: tuple[str, ...]) -> None:
    with pytest.raises((InvalidId, WrongUsage)):
        order("resume", words)


def test_a_model_to_reclaim_needs_its_runtime() -> None:
    with pytest.raises(WrongUsage, match="--runtime"):
        order("reclaim", ("box", "gpu0"), model="m")


def test_a_device_option_may_name_the_host_too_but_not_another_one() -> None:
    assert host_and_device(None, "box/gpu0") == ("box", "gpu0")
    assert host_and_device("box", "gpu0") == ("box", "gpu0")
    with pytest.raises(WrongUsage):
        host_and_device("other", "box/gpu0")
