"""What the scheduler is told: its clocks, deadlines and kinds of jobs, and the weights of a score."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from gpukeeper.events.ids import TOKEN_PATTERN

Token = Annotated[str, msgspec.Meta(pattern=TOKEN_PATTERN)]
#: Up to 30 days.
Seconds = Annotated[float, msgspec.Meta(gt=0, le=2_592_000)]
Weight = Annotated[float, msgspec.Meta(ge=-1_000_000, le=1_000_000)]
Priority = Annotated[int, msgspec.Meta(ge=-1000, le=1000)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of every configuration record: an unknown key is an error, never ignored."""


class DeadlinePolicy(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a job may spend in each phase, in seconds, unless it brings deadlines of its own."""

    #: From acceptance to admission.
    queue_s: Seconds = 86_400.0
    #: From admission to a verified placement.
    load_s: Seconds = 600.0
    #: From the start to the first token.
    first_byte_s: Seconds = 300.0
    #: Between two tokens.
    idle_s: Seconds = 300.0
    #: From the start to the end.
    run_s: Seconds = 21_600.0


class KindConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for one kind of job."""

    #: For jobs that bring none. Higher goes first.
    priority: Priority = 0
    #: What happens when no device can take the job now: wait for one, or end with reason ``capacity``.
    on_capacity: Literal["wait", "reject"] = "wait"


class Kinds(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The kinds of jobs. ``inference`` (best score) is built in."""

    inference: KindConfig = KindConfig()


class ScoreWeights(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each term adds to the score of a device that could take a job. The highest sum wins."""

    #: The model is resident there, verified.
    warm: Weight = 100.0
    #: The runtime answers.
    runtime_up: Weight = 40.0
    #: The job fits beside what is resident.
    fits: Weight = 20.0
    #: Something resident would have to go first.
    evicts: Weight = -60.0
    #: The model is not there yet and would have to be fetched first.
    provision: Weight = -30.0
    #: No job runs on the device.
    idle: Weight = 10.0
    #: For each job already queued there.
    queued: Weight = -30.0


class SchedulerConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a scheduler needs to know."""

    site: Token = "main"
    #: A claim without a heartbeat for this long may lapse.
    claim_ttl_s: Seconds = 30.0
    #: The leader's lease. Another scheduler takes over after this long.
    lease_ttl_s: Seconds = 6.0
    #: A snapshot of the state is stored after this many events.
    snapshot_every_events: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 50_000
    deadlines: DeadlinePolicy = DeadlinePolicy()
    #: Where deadlines were configured, by field: shown when one expires. Those not named are built-in defaults.
    deadline_sources: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    kinds: Kinds = Kinds()
    weights: ScoreWeights = ScoreWeights()
    #: Ended jobs leave the state after this long in event time. The log keeps them.
    forget_after_s: Annotated[float, msgspec.Meta(gt=0, le=315_360_000)] = 86_400.0
    #: Ended jobs leave the state, oldest first, above this many.
    forget_above: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000

    def deadline_source(self, field: str) -> str:
        """Where the deadline ``field`` (``queue_s``, …) was configured, or empty: the built-in default."""
        return self.deadline_sources.get(field, "")
