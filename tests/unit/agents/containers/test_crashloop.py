"""When a container counts as crash-looping."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpukeeper.agents.containers.crashloop import CrashLoop, Observation, crash_loop, remember


def looks(*pairs: tuple[float, int], container: str = "c1") -> tuple[Observation, ...]:
    return tuple(Observation(at_s, count, "running", container) for at_s, count in pairs)


def judged(*pairs: tuple[float, int], now_s: float | None = None, k: int = 3, window_s: float = 600) -> bool:
    at_s = pairs[-1][0] if now_s is None else now_s
    return crash_loop(looks(*pairs), restarts=k, window_s=window_s, now_s=at_s) is not None


def test_c34_a_container_that_flaps_through_35_restarts_loops_from_the_third_on() -> None:
    seen: tuple[Observation, ...] = ()
    verdicts: list[bool] = []
    for count in range(36):
        for step, status in enumerate(("restarting", "running")):
            at_s = count * 15.0 + step
            seen = remember(seen, Observation(at_s, count, status, "c1"), restarts=3, window_s=600)
            verdicts.append(crash_loop(seen, restarts=3, window_s=600, now_s=at_s) is not None)

    assert verdicts == [False] * 6 + [True] * 66
    found = crash_loop(seen, restarts=3, window_s=600, now_s=35 * 15.0 + 1)
    assert found is not None
    assert found.restart_count == 35
    assert len(seen) <= 8


def test_one_restart_less_is_none() -> None:
    assert not judged((0, 0), (1, 2))
    assert judged((0, 0), (1, 3))


def test_restarts_between_two_looks_all_count() -> None:
    assert judged((0, 4), (5, 5), (10, 7))


def test_a_count_that_was_there_before_the_first_look_is_no_evidence() -> None:
    assert not judged((0, 35))
    assert not judged((0, 35), (5, 35))


def test_restarts_that_lie_further_back_than_the_window_do_not_count() -> None:
    restarts = ((0.0, 0), (1.0, 1), (2.0, 2), (3.0, 3))

    assert judged(*restarts, now_s=600)
    assert not judged(*restarts, now_s=601)


def test_slow_restarts_are_no_loop() -> None:
    assert not judged(*((at * 400.0, at) for at in range(20)))


def test_a_container_that_somebody_started_again_by_hand_begins_afresh() -> None:
    assert not judged((0, 0), (1, 2), (2, 0), (3, 1))


def test_another_container_of_the_same_name_begins_afresh() -> None:
    one = looks((0, 0), (1, 2))
    other = looks((2, 3), (3, 4), container="c2")

    assert crash_loop(one + other, restarts=3, window_s=600, now_s=3) is None
    assert remember(one, other[0], restarts=3, window_s=600) == (other[0],)


def test_after_a_gap_longer_than_the_window_a_rise_tells_of_one_restart_only() -> None:
    assert not judged((0, 0), (7200, 30))
    assert not judged((0, 0), (7200, 30), (7205, 31))
    assert judged((0, 0), (7200, 30), (7205, 32))


def test_the_words_say_how_often_and_within_what() -> None:
    found = CrashLoop(restarts=4, window_s=600, restart_count=21)

    assert found.words == "it was restarted 4 times within 600 s (21 in all)"


@given(
    steps=st.lists(
        st.tuples(st.floats(0.1, 200), st.integers(0, 3), st.sampled_from(["a", "a", "a", "b"])), max_size=80
    ),
    k=st.integers(2, 6),
    window_s=st.floats(50, 600),
)
def test_what_is_remembered_is_short_and_decides_as_all_that_was_seen(
    steps: list[tuple[float, int, str]], k: int, window_s: float
) -> None:
    everything: list[Observation] = []
    kept: tuple[Observation, ...] = ()
    at_s, count = 0.0, 0
    for step_s, more, container in steps:
        at_s, count = at_s + step_s, count + more
        newest = Observation(at_s, count, "running", container)
        kept = remember(kept, newest, restarts=k, window_s=window_s)
        if everything and everything[-1].id != container:
            everything.clear()
        everything.append(newest)

        assert len(kept) <= 2 * (k + 1)
        by_all = crash_loop(everything, restarts=k, window_s=window_s, now_s=at_s)
        by_kept = crash_loop(kept, restarts=k, window_s=window_s, now_s=at_s)
        assert (by_kept is None) == (by_all is None)
