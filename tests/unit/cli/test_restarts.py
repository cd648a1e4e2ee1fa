"""A program that died is started again after a bounded wait, and not for ever."""

from __future__ import annotations

from gpukeeper.cli.restarts import RestartPolicy, restart_delay_s

POLICY = RestartPolicy()


def test_the_wait_doubles_from_a_fifth_of_a_second_to_five() -> None:
    waits = [restart_delay_s([0.0] * deaths, 0.0, POLICY) for deaths in range(1, 9)]

    assert waits == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_the_ninth_death_within_a_minute_is_the_end() -> None:
    deaths = [float(second) for second in range(9)]

    assert restart_delay_s(deaths, 60.0, POLICY) is None
    assert restart_delay_s(deaths, 60.5, POLICY) == 5.0


def test_a_program_that_lived_for_long_starts_with_the_shortest_wait() -> None:
    assert restart_delay_s([0.0, 1.0, 2.0, 100.0], 100.0, POLICY) == 0.2
