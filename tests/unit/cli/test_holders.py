"""Who holds a device's memory, as parts and as a bar."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.cli.evidence import HostEvidence
from gpukeeper.cli.holders import LETTERS, Kind, Part, bar, in_words, parts
from gpukeeper.cli.livesite import Heard
from gpukeeper.cli.siteview import bar_rows, device_rows, devices_document, runtime_rows
from gpukeeper.events import device, runtime
from support.history import History
from support.hostlooks import card, heard, look


@pytest.fixture
def h() -> History:
    history = History()
    history.joined(runtimes=("comfyui", "ollama"))
    history.registered(runtime_name="comfyui", provider="comfyui", releases="all", loads_models=False)
    history.registered(runtime_name="ollama", releases="model")
    return history


def shown(h: History, beats: dict[str, Heard]) -> tuple[Part, ...]:
    host = h.site.hosts["h1"]
    return parts(HostEvidence(h.site, host, beats.get("h1"), h.at_ns), h.device())


def beats(h: History, **comfyui: Any) -> dict[str, Heard]:
    given: dict[str, Any] = {"holds_mb": 10_000, "idle_s": 120}
    return heard(
        h.at_ns,
        devices=[card(h.at_ns, free_mb=4000)],
        runtimes=[
            look(h.at_ns, "comfyui", **(given | comfyui)),
            look(h.at_ns, "ollama", holds_mb=8000, resident={"m": 8000}, idle_s=7),
        ],
    )


def test_each_runtime_what_nobody_registered_and_what_is_free_have_their_part(h: History) -> None:
    found = shown(h, beats(h))

    assert [(part.kind, part.mb, part.runtime, part.model, part.idle_s) for part in found] == [
        ("idle", 10_000, "comfyui", None, 120.0),
        ("idle", 8000, "ollama", "m", 7.0),
        ("unmanaged", 2000, "", None, None),
        ("free", 4000, "", None, None),
    ]
    assert sum(part.mb or 0 for part in found) == 24_000
    assert in_words(found) == (
        "comfyui 9.8 GB, idle 2 min 00 s; ollama/m 8000 MB, idle 7.00 s; unmanaged 2000 MB; free 4000 MB"
    )


def test_a_job_of_ours_a_busy_runtime_and_one_that_does_not_say_are_told_apart(h: History) -> None:
    h.is_running("a")
    h.after(5)
    kinds = [part.kind for part in shown(h, beats(h, activity="busy"))]
    unsure = [part.kind for part in shown(h, beats(h, idle_s=None))]

    assert kinds == ["job", "busy", "unmanaged", "free"]
    assert unsure == ["job", "unsure", "unmanaged", "free"]


def test_what_was_promised_to_a_job_that_loads_is_not_free(h: History) -> None:
    h.accepted("a", vram_mb=3000)
    h.routed("a")
    h.claimed("a")
    h.admitted("a")

    found = {part.kind: part for part in shown(h, beats(h))}

    assert (found["reserved"].mb, found["reserved"].jobs, found["free"].mb) == (3000, ("a",), 1000)


def test_where_a_runtime_does_not_say_what_it_holds_the_rest_is_unknown_and_not_unmanaged(h: History) -> None:
    found = shown(h, beats(h, holds_mb=None, resident={}, healthy=False))

    assert ("unknown", 12_000) in [(part.kind, part.mb) for part in found]
    assert "unmanaged" not in [part.kind for part in found]


def test_a_device_that_could_not_be_read_is_unknown_as_a_whole(h: History) -> None:
    silent = shown(h, {})
    lost = shown(h, heard(h.at_ns, devices=[card(h.at_ns, free_mb=None, total_mb=None, state="lost")]))

    assert [(part.kind, part.mb) for part in (*silent, *lost)] == [("unknown", 24_000)] * 2
    assert bar(silent, 8) == "????????"


def test_the_screen_says_in_words_what_is_drained_pinned_silent_and_idle(h: History) -> None:
    h.fact(device.Drained(host="h1", device="g0", command_seq=1, actor="ann", reason="new fan"))
    h.fact(runtime.Pinned(host="h1", runtime="comfyui", actor="ann"))
    live = devices_document(h.site, beats(h), now_ns=h.at_ns)
    silent = devices_document(h.site, {}, now_ns=h.at_ns)

    (row,) = device_rows(live)
    assert row[3] == "healthy, drained by ann: new fan"
    (gone,) = device_rows(silent)
    assert str(gone[3]).startswith("unknown: its agent is silent")
    comfyui = next(row for row in runtime_rows(live) if row[0] == "h1/comfyui")
    assert (comfyui[3], comfyui[5]) == ("healthy, idle for 2 min 00 s", "all of it")
    works = devices_document(h.site, beats(h, activity="busy"), now_ns=h.at_ns)
    assert next(row[3] for row in runtime_rows(works) if row[0] == "h1/comfyui") == "healthy, busy"
    ((name, letters, words),) = bar_rows(live, 24)
    assert (name, letters) == ("h1/g0", "I" * 18 + "u" * 2 + "." * 4)
    assert "comfyui 9.8 GB, idle 2 min 00 s, pinned" in str(words)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(LETTERS)), st.integers(1, 10**6) | st.none()), max_size=9),
    st.integers(9, 80),
)
def test_a_bar_is_as_long_as_asked_and_shows_everything_that_holds_anything(
    sizes: list[tuple[Kind, int | None]], width: int
) -> None:
    found = [Part(kind=kind, mb=mb) for kind, mb in sizes]

    drawn = bar(found, width)

    assert len(drawn) == width
    assert {LETTERS[kind] for kind, mb in sizes if mb} <= set(drawn)
