"""The only place that builds a subject name.

One literal subject per aggregate: optimistic concurrency is sound on a literal subject only.
"""

from __future__ import annotations

from gpukeeper.events.ids import require_token

LOG_STREAM = "GPUQ_LOG"
BEATS_STREAM = "GPUQ_BEATS"
PAYLOADS_BUCKET = "GPUQ_PAYLOADS"
SNAPSHOTS_BUCKET = "GPUQ_SNAPSHOTS"
LEASE_BUCKET = "GPUQ_LEASE"

LOG_SUBJECTS = ("gpuq.submit.*", "gpuq.cmd.*", "gpuq.ev.>")
BEAT_SUBJECTS = ("gpuq.hb.*",)

SUBMIT_PREFIX = "gpuq.submit."
COMMAND_PREFIX = "gpuq.cmd."
EVENT_PREFIX = "gpuq.ev."
SITE = "gpuq.ev.site"
ALL_JOBS = "gpuq.ev.job.*"


def submit(producer: str) -> str:
    return SUBMIT_PREFIX + require_token(producer, "producer")


def command(actor: str) -> str:
    return COMMAND_PREFIX + require_token(actor, "actor")


def job(job_id: str) -> str:
    return "gpuq.ev.job." + require_token(job_id, "job")


def route(host: str, job_id: str) -> str:
    return f"gpuq.ev.route.{require_token(host, 'host')}.{require_token(job_id, 'job')}"


def device(host: str, device_id: str) -> str:
    return f"gpuq.ev.device.{require_token(host, 'host')}.{require_token(device_id, 'device')}"


def runtime(host: str, name: str) -> str:
    return f"gpuq.ev.runtime.{require_token(host, 'host')}.{require_token(name, 'runtime')}"


def host(name: str) -> str:
    return "gpuq.ev.host." + require_token(name, "host")


def beat(host_name: str) -> str:
    return "gpuq.hb." + require_token(host_name, "host")


def out(job_id: str) -> str:
    """Where the tokens of a running job are published. Not a fact, not stored."""
    return "gpuq.out." + require_token(job_id, "job")


def followed_by_agent(host_name: str) -> tuple[str, ...]:
    """What an agent reads of the log: its own routes, devices, runtimes and host."""
    require_token(host_name, "host")
    return (
        f"gpuq.ev.route.{host_name}.*",
        f"gpuq.ev.device.{host_name}.*",
        f"gpuq.ev.runtime.{host_name}.*",
        f"gpuq.ev.host.{host_name}",
    )


def matches(pattern: str, subject: str) -> bool:
    """Whether ``subject`` falls under ``pattern`` (``*`` one token, a final ``>`` one or more)."""
    if pattern == subject:
        return True
    wanted = pattern.split(".")
    given = subject.split(".")
    for place, part in enumerate(wanted):
        if part == ">":
            return len(given) > place
        if place >= len(given) or part not in ("*", given[place]):
            return False
    return len(wanted) == len(given)


def agent_ping(host_name: str) -> str:
    """Where one agent answers that it lives."""
    return f"gpuq.agent.{require_token(host_name, 'host')}.ping"


def agent_output(host_name: str) -> str:
    """Where one agent serves the tokens of its jobs again, from an offset."""
    return f"gpuq.agent.{require_token(host_name, 'host')}.output"


SCHEDULER_STATUS = "gpuq.scheduler.status"

#: Where any scheduler says what became of a job or of a submission.
ASK_JOB = "gpuq.ask.job"
