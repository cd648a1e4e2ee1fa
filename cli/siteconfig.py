"""What one ``gpuq.toml`` may say, and what each process is told of it. Pure: no files, no environment."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from gpukeeper.agents.config import (
    KATAGO_COMMAND,
    MEGABYTES_MAX,
    STOP_PROOF_S_MAX,
    AgentConfig,
    Config,
    DeviceConfig,
    RuntimeConfig,
    Seconds,
    Token,
)
from gpukeeper.events.endpoints import Endpoint, endpoint_of
from gpukeeper.events.ids import TOKEN_RULE, is_token
from gpukeeper.scheduler.config import DeadlinePolicy, Kinds, SchedulerConfig, ScoreWeights

NATS_SCHEMES = ("nats", "tls", "ws", "wss")
#: How many heartbeats must fit into the life of a claim, so that one late beat loses nothing.
BEATS_IN_CLAIM_TTL_MIN = 2
#: Providers that are reached through the container engine.
CONTAINED = ("katago", "container")
#: How those may let go of memory.
RELEASES_OF_CONTAINED = {"katago": ("auto", "none"), "container": ("auto", "none", "stop")}
_SYNC_INTERVAL = re.compile(r"always|[1-9][0-9]{0,5}(ms|s|m)")
_INBOX_PREFIX = re.compile(r"[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,3}")


class SiteSection(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[site]``: one log and all that reads it."""

    name: Token = "main"


class HostSection(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[host]``: this machine. Its name is the machine's own unless given."""

    name: Token | None = None


class NatsConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[nats]``: a NATS that somebody else runs. Secrets are named by file, never written here."""

    #: ``nats://host:4222``, or several divided by commas. None: the server that ``gpuq up`` started here.
    url: str | None = None
    user: str | None = None
    password_file: str | None = None
    token_file: str | None = None
    #: A file with a JWT and an NKey seed, as ``nsc`` writes it.
    creds_file: str | None = None
    #: The certificate authority of the server, where the system's own do not know it.
    tls_ca: str | None = None
    #: Replies arrive under this prefix. Set it where the server's permissions ask for one.
    inbox_prefix: str | None = None
    connect_timeout_s: Seconds = 5.0


class AgentSection(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[agent]``: the clocks of this host's agent, and what it may find by itself."""

    heartbeat_s: Seconds = 5.0
    stop_grace_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 30.0
    stop_proof_s: Annotated[float, msgspec.Meta(gt=0, le=STOP_PROOF_S_MAX)] = STOP_PROOF_S_MAX
    recheck_after_s: Seconds = 60.0
    reading_timeout_s: Seconds = 5.0
    find_devices: bool = True
    find_runtimes: bool = True
    idle_grace_s: Annotated[float, msgspec.Meta(ge=0, le=2_592_000)] = 300.0
    pull_leaves_disk_mb: Annotated[int, msgspec.Meta(ge=0, le=MEGABYTES_MAX)] = 10_240
    crash_loop_restarts: Annotated[int, msgspec.Meta(ge=2, le=1_000)] = 3
    crash_loop_window_s: Seconds = 600.0


class SchedulerSection(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[scheduler]``: see :class:`gpukeeper.scheduler.config.SchedulerConfig`."""

    claim_ttl_s: Seconds = 30.0
    lease_ttl_s: Seconds = 6.0
    snapshot_every_events: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 50_000
    weights: ScoreWeights = ScoreWeights()
    forget_after_s: Annotated[float, msgspec.Meta(gt=0, le=315_360_000)] = 86_400.0
    forget_above: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)] = 100_000


class ServerSection(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[server]``: the NATS server that ``gpuq up`` starts and owns."""

    #: A port that must be had; 0 or -1 for any free one. None: the last one, else 4222, else any free one.
    port: Annotated[int, msgspec.Meta(ge=-1, le=65_535)] | None = None
    #: The largest message. Larger bodies go to the object store.
    max_payload_mb: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    #: ``always``: an acknowledged write is on disk. Else the longest time between two syncs, such as ``10s``.
    sync_interval: str = "always"
    #: How long the server may take to read its files back at the start.
    start_timeout_s: Seconds = 120.0
    #: The nats-server to run, rather than the one installed beside gpukeeper or on PATH.
    binary: str | None = None


class LogSection(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[log]``: what the streams are like when they are made. Streams that exist are left as they are.

    The log itself has no limit of age or size: facts are kept for ever.
    """

    #: How many servers keep each message: 1, or 3 or 5 in a cluster of as many.
    replicas: Literal[1, 3, 5] = 1
    #: How long bodies and results that were too large for the log are kept.
    payload_ttl_s: Annotated[float, msgspec.Meta(ge=0, le=3_153_600_000)] = 604_800.0


#: Providers whose servers do not say how much memory their model takes.
SAYS_NO_SIZE = ("huggingface", "vllm")


class SiteConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``gpuq.toml``."""

    site: SiteSection = SiteSection()
    host: HostSection = HostSection()
    nats: NatsConfig = NatsConfig()
    devices: tuple[DeviceConfig, ...] = ()
    runtimes: tuple[RuntimeConfig, ...] = ()
    kinds: Kinds = Kinds()
    scheduler: SchedulerSection = SchedulerSection()
    agent: AgentSection = AgentSection()
    deadlines: DeadlinePolicy = DeadlinePolicy()
    server: ServerSection = ServerSection()
    log: LogSection = LogSection()


class Problem(msgspec.Struct, frozen=True):
    """One value that is of the right type and still wrong. ``path`` is like ``runtimes[0].url``."""

    path: str
    value: object
    wanted: str


def problems(config: SiteConfig) -> Iterator[Problem]:
    """What is wrong with ``config`` beyond the type of each value."""
    yield from _nats_problems(config.nats)
    yield from _token_problems(config)
    if not _SYNC_INTERVAL.fullmatch(config.server.sync_interval):
        yield Problem("server.sync_interval", config.server.sync_interval, '"always", or a time such as "10s"')
    yield from _repeated("devices", "id", (device.id for device in config.devices))
    yield from _repeated("runtimes", "name", (runtime.name for runtime in config.runtimes))
    yield from _repeated("runtimes", "container", (runtime.container for runtime in config.runtimes))
    yield from _same_server(config.runtimes)
    declared = {device.id for device in config.devices}
    for place, device in enumerate(config.devices):
        if device.source == "static" and device.total_mb is None:
            yield Problem(f"devices[{place}].total_mb", None, "a capacity, as nothing can read a static device")
        if device.total_mb is not None and device.headroom_mb >= device.total_mb:
            wanted = f"less than its total_mb of {device.total_mb}, or nothing is ever given out there"
            yield Problem(f"devices[{place}].headroom_mb", device.headroom_mb, wanted)
    for place, runtime in enumerate(config.runtimes):
        needs_url = runtime.provider not in CONTAINED
        if "@" in runtime.url:
            # Neither is it shown here: the URL stands in the log, which keeps it for ever, and on every screen.
            yield Problem(f"runtimes[{place}].url", "http://...@...", "no secret: everybody can read it in the log")
        elif (needs_url or runtime.url) and not _leads_somewhere(runtime.url, ("http", "https")):
            yield Problem(f"runtimes[{place}].url", runtime.url, "a URL such as http://127.0.0.1:11434")
        yield from _container_problems(f"runtimes[{place}]", runtime)
        if runtime.provider in SAYS_NO_SIZE and runtime.holds_mb is None and not _only_cpu(runtime, config.devices):
            wanted = f"how much VRAM it takes, in MB: a {runtime.provider} server does not say, and nothing else does"
            yield Problem(f"runtimes[{place}].holds_mb", None, wanted)
        capacity_mb = _capacity_mb(runtime, config.devices)
        if runtime.holds_mb is not None and capacity_mb is not None and runtime.holds_mb > capacity_mb:
            wanted = f"at most {capacity_mb}, which is all that its devices are declared with"
            yield Problem(f"runtimes[{place}].holds_mb", runtime.holds_mb, wanted)
        if not config.agent.find_devices:
            for unknown in (each for each in runtime.devices if each not in declared):
                yield Problem(
                    f"runtimes[{place}].devices",
                    unknown,
                    "the id of a declared device, as find_devices is off",
                )
    shortest_s = BEATS_IN_CLAIM_TTL_MIN * config.agent.heartbeat_s
    if config.scheduler.claim_ttl_s < shortest_s:
        yield Problem(
            "scheduler.claim_ttl_s",
            config.scheduler.claim_ttl_s,
            f"at least {shortest_s:g}, {BEATS_IN_CLAIM_TTL_MIN} times agent.heartbeat_s, or live claims end",
        )


def _leads_somewhere(url: str, schemes: Container[str]) -> bool:
    """Whether ``url`` names a host, and a port that can be one."""
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0 and not re.search(r"\s", url)
    except ValueError:  # brackets without a pair, or a port that is no number or too large
        return False


def _same_server(runtimes: Iterable[RuntimeConfig]) -> Iterator[Problem]:
    """Two entries of one server: each would take what it holds and does for its own.

    Whatever the rest of the URL says: processes are told apart by the port that they listen on.
    """
    seen: dict[Endpoint, str] = {}
    for place, runtime in enumerate(runtimes):
        endpoint = endpoint_of(runtime.url)
        if endpoint is None:
            continue
        other = seen.setdefault(endpoint, runtime.name)
        if other != runtime.name:
            yield Problem(f"runtimes[{place}].url", runtime.url, f"another host or port than that of runtime {other}")


def _capacity_mb(runtime: RuntimeConfig, devices: Iterable[DeviceConfig]) -> int | None:
    """All that the devices of a runtime have, where every one is declared with its capacity."""
    declared = {device.id: device.total_mb for device in devices}
    named = [declared.get(device) for device in runtime.devices]
    return sum(each or 0 for each in named) if named and None not in named else None


def _only_cpu(runtime: RuntimeConfig, devices: Iterable[DeviceConfig]) -> bool:
    """Whether the runtime may use declared CPUs only, where nothing needs to be in VRAM."""
    cpus = {device.id for device in devices if device.source == "cpu" or device.kind == "cpu"}
    return bool(runtime.devices) and set(runtime.devices) <= cpus


def _nats_problems(nats: NatsConfig) -> Iterator[Problem]:
    for url in () if nats.url is None else nats.url.split(","):
        if "@" in url:
            # The URL is shown in logs and on pages, so the value is left out here too.
            yield Problem("nats.url", "nats://...@...", "no secret: use user and password_file")
        elif not _leads_somewhere(url.strip(), NATS_SCHEMES):
            yield Problem("nats.url", url, f"a URL of {', '.join(NATS_SCHEMES)}, such as nats://127.0.0.1:4222")
    if (nats.user is None) != (nats.password_file is None):
        missing = "nats.user" if nats.user is None else "nats.password_file"
        yield Problem(missing, None, "user and password_file together")
    if nats.inbox_prefix is not None and not _INBOX_PREFIX.fullmatch(nats.inbox_prefix):
        yield Problem("nats.inbox_prefix", nats.inbox_prefix, "one to four subject tokens, such as _INBOX_me")
    if nats.url is None and nats != NatsConfig(connect_timeout_s=nats.connect_timeout_s):
        yield Problem("nats.url", None, "the server that the rest of [nats] is for")
    ways = [name for name in ("password_file", "token_file", "creds_file") if getattr(nats, name) is not None]
    if len(ways) > 1:
        yield Problem(f"nats.{ways[1]}", getattr(nats, ways[1]), f"one way to log in, and {ways[0]} is given too")


def _token_problems(config: SiteConfig) -> Iterator[Problem]:
    # The pattern of the type lets a final newline pass, as `$` does in Python; a subject cannot.
    tokens = [("site.name", config.site.name), ("host.name", config.host.name or "host")]
    tokens += [(f"devices[{place}].id", device.id) for place, device in enumerate(config.devices)]
    for place, runtime in enumerate(config.runtimes):
        tokens += [(f"runtimes[{place}].name", runtime.name)]
        tokens += [(f"runtimes[{place}].devices", device) for device in runtime.devices]
    for path, value in tokens:
        if not is_token(value):
            yield Problem(path, value, TOKEN_RULE)


def _container_problems(path: str, runtime: RuntimeConfig) -> Iterator[Problem]:
    if runtime.container is None and runtime.provider in CONTAINED:
        yield Problem(f"{path}.container", None, f"the name of a container, as provider {runtime.provider} acts on one")
    if runtime.release == "pause":
        wanted = "another way to let go: a paused container keeps all its memory, on every device"
        yield Problem(f"{path}.release", runtime.release, wanted)
    allowed = RELEASES_OF_CONTAINED.get(runtime.provider, (runtime.release, "pause"))
    if runtime.release not in (*allowed, "pause"):
        wanted = f"one of {', '.join(allowed)} for provider {runtime.provider}"
        yield Problem(f"{path}.release", runtime.release, wanted)
    if runtime.provider != "katago" and runtime.command != KATAGO_COMMAND:
        yield Problem(f"{path}.command", list(runtime.command), "left out: only katago is started by a command")


def _repeated(section: str, key: str, values: Iterable[str | None]) -> Iterator[Problem]:
    seen: set[str] = set()
    for place, value in enumerate(values):
        if value is None:
            continue
        if value in seen:
            yield Problem(f"{section}[{place}].{key}", value, "a value that no other entry has")
        seen.add(value)


def host_name_from(machine_name: str) -> str:
    """The machine's name as a subject token: its first label, other characters as ``-``; ``host`` if none."""
    label = machine_name.split(".", 1)[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", label).strip("-")[:64] or "host"


def agent_config(config: SiteConfig, *, machine_name: str) -> AgentConfig:
    """What this host's agent is told. ``machine_name`` (``platform.node()``) serves where none is given."""
    return AgentConfig(
        host=config.host.name or host_name_from(machine_name),
        site=config.site.name,
        devices=config.devices,
        runtimes=config.runtimes,
        find_devices=config.agent.find_devices,
        find_runtimes=config.agent.find_runtimes,
        heartbeat_s=config.agent.heartbeat_s,
        stop_grace_s=config.agent.stop_grace_s,
        stop_proof_s=config.agent.stop_proof_s,
        recheck_after_s=config.agent.recheck_after_s,
        reading_timeout_s=config.agent.reading_timeout_s,
        idle_grace_s=config.agent.idle_grace_s,
        pull_leaves_disk_mb=config.agent.pull_leaves_disk_mb,
        crash_loop_restarts=config.agent.crash_loop_restarts,
        crash_loop_window_s=config.agent.crash_loop_window_s,
    )


def scheduler_config(config: SiteConfig, *, deadline_sources: Mapping[str, str] | None = None) -> SchedulerConfig:
    """What a scheduler is told. ``deadline_sources`` (from :class:`Loaded`) says where deadlines were written."""
    return SchedulerConfig(
        site=config.site.name,
        claim_ttl_s=config.scheduler.claim_ttl_s,
        lease_ttl_s=config.scheduler.lease_ttl_s,
        snapshot_every_events=config.scheduler.snapshot_every_events,
        deadlines=config.deadlines,
        deadline_sources=dict(deadline_sources or {}),
        kinds=config.kinds,
        weights=config.scheduler.weights,
        forget_after_s=config.scheduler.forget_after_s,
        forget_above=config.scheduler.forget_above,
    )
