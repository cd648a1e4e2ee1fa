"""``gpuq.toml`` is decoded strictly, and every error names the place and what would be right."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpukeeper.agents.config import AgentConfig
from gpukeeper.cli.configuration import decode_config, find_config, load_config
from gpukeeper.cli.siteconfig import SiteConfig, agent_config, host_name_from, scheduler_config
from gpukeeper.events.errors import ConfigError
from gpukeeper.scheduler.config import SchedulerConfig

EXAMPLE = Path(__file__).parents[3] / "docs" / "gpuq.toml"

RUNTIME = '[[runtimes]]\nname = "a"\nprovider = "ollama"\nurl = "http://127.0.0.1:1"\n'


def load(folder: Path, environ: dict[str, str] | None = None, given: Path | None = None) -> SiteConfig:
    return load_config(given, environ or {}, cwd=folder, user_folder=folder / "user").config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[[runtimes]]\nprovidr = "ollama"',
            r'runtimes\[0\].providr = "ollama": unknown key; did you mean provider\?',
        ),
        ("[agents]", r"agents = a table: unknown key; did you mean agent\?"),
        ("[kinds.task]", r"kinds.task = a table: unknown key; known keys are inference"),
        ("zzz = 1", r"zzz = 1: unknown key; known keys are site, host, nats"),
        (
            RUNTIME + RUNTIME.replace('"a"', '"b"').replace("ollama", "olama"),
            r'runtimes\[1\].provider = "olama": must be one of "comfyui", .*"llamacpp", "ollama"',
        ),
        (
            '[kinds.inference]\non_capacity = "maybe"',
            r'kinds.inference.on_capacity = "maybe": must be one of "reject", "wait"',
        ),
        ('[[runtimes]]\nname = "a"', r"runtimes\[0\].provider: missing"),
        ("runtimes = 3", r"runtimes = 3: expected array, got integer"),
        ("nats = 3", r"nats = 3: expected table, got integer"),
        ("[agent]\nfind_devices = 1", r"agent.find_devices = 1: expected boolean, got integer"),
        (
            '[[devices]]\nid = "c"\ntotal_mb = "x"',
            r'devices\[0\].total_mb = "x": expected integer, got string',
        ),
        ("[deadlines]\nqueue_s = 0", r"deadlines.queue_s = 0: expected float > 0"),
        ("[deadlines]\nqueue_s = nan", r"deadlines.queue_s = nan: expected float"),
        ("[deadlines]\nqueue_s = inf", r"deadlines.queue_s = inf: expected float <= 2592000"),
        ("[scheduler.weights]\nwarm = nan", r"scheduler.weights.warm = nan: expected float"),
        ('[host]\nname = "a.b"', r'host.name = "a.b": expected string of 1 to 64 of A-Z a-z 0-9 _ -'),
        ('[host]\nname = "a\\n"', r"host.name = .*: expected string of 1 to 64 of A-Z a-z 0-9 _ -"),
        ('[[devices]]\nid = "a\\n"', r"devices\[0\].id = .*: expected string of 1 to 64 of A-Z a-z 0-9 _ -"),
        (
            RUNTIME + 'devices = ["c\\n"]',
            r"runtimes\[0\].devices\[0\] = .*: expected string of 1 to 64 of A-Z a-z 0-9 _ -",
        ),
        (RUNTIME + RUNTIME, r'runtimes\[1\].name = "a": must be a value that no other entry has'),
        (
            RUNTIME + RUNTIME.replace('"a"', '"b"').replace("127.0.0.1:1", "localhost:1/api"),
            r'runtimes\[1\].url = "http://localhost:1/api": must be another host or port than that of runtime a',
        ),
        ('[[devices]]\nid = "c"\ntotal_mb = -1', r"devices\[0\].total_mb = -1: expected integer >= 1"),
        ('[[devices]]\nid = "c"\ntotal_mb = 1000000001', r"devices\[0\].total_mb = 1000000001: expected integer <="),
        ('[[devices]]\nid = "c"\nheadroom_mb = -1', r"devices\[0\].headroom_mb = -1: expected integer >= 0"),
        (
            '[[devices]]\nid = "c"\ntotal_mb = 10\nheadroom_mb = 10',
            r"devices\[0\].headroom_mb = 10: must be less than its total_mb of 10",
        ),
        (
            '[[devices]]\nid = "c"\ntotal_mb = 10\n'
            + RUNTIME.replace("ollama", "vllm")
            + 'holds_mb = 11\ndevices = ["c"]',
            r"runtimes\[0\].holds_mb = 11: must be at most 10, which is all that its devices are declared with",
        ),
        ('[[devices]]\nid = "c"\n' * 2, r'devices\[1\].id = "c": must be a value that no other entry has'),
        ('[[devices]]\nid = "c"\nsource = "static"', r"devices\[0\].total_mb: missing: must be a capacity"),
        (RUNTIME.replace("ollama", "vllm"), r"runtimes\[0\].holds_mb: missing: must be how much VRAM it takes"),
        (RUNTIME.replace("ollama", "huggingface") + "holds_mb = 0", r"runtimes\[0\].holds_mb = 0: expected"),
        (RUNTIME.replace("http:", "ftp:"), r'runtimes\[0\].url = "ftp://127.0.0.1:1": must be a URL such as'),
        (RUNTIME.replace("127.0.0.1:1", "[::1"), r'runtimes\[0\].url = "http://\[::1": must be a URL such as'),
        (RUNTIME.replace(":1", ":99999"), r'runtimes\[0\].url = "http://127.0.0.1:99999": must be a URL such as'),
        (RUNTIME.replace("127.0", "127 0"), r'runtimes\[0\].url = "http://127 0.0.1:1": must be a URL such as'),
        (
            "[agent]\nfind_devices = false\n" + RUNTIME + 'devices = ["cpu"]',
            r'runtimes\[0\].devices = "cpu": must be the id of a declared device',
        ),
        (
            "[scheduler]\nclaim_ttl_s = 9",
            r"scheduler.claim_ttl_s = 9.0: must be at least 10, 2 times agent.heart",
        ),
        ('[server]\nsync_interval = "0s"', r'server.sync_interval = "0s": must be "always", or a time'),
        ("[server]\nport = 65536", r"server.port = 65536: expected integer <= 65535"),
        ('[nats]\nurl = "http://a"', r'nats.url = "http://a": must be a URL of nats, tls, ws, wss'),
        ('[nats]\nurl = "nats://[::1"', r'nats.url = "nats://\[::1": must be a URL of nats'),
        ('[nats]\nurl = "nats://a:b"', r'nats.url = "nats://a:b": must be a URL of nats'),
        ('[nats]\nurl = "nats://a:99999"', r'nats.url = "nats://a:99999": must be a URL of nats'),
        ('[nats]\nurl = "nats://a,b"', r'nats.url = "b": must be a URL of nats, tls, ws, wss'),
        (
            '[nats]\nurl = "nats://a"\nuser = "a"',
            r"nats.password_file: missing: must be user and password_file together",
        ),
        ('[nats]\ntoken_file = "a"', r"nats.url: missing: must be the server that the rest of \[nats\] is for"),
        (
            '[nats]\nurl = "nats://a"\ntoken_file = "a"\ncreds_file = "b"',
            r"nats.creds_file = .*: must be one way to log in",
        ),
        ('[nats]\ninbox_prefix = "a.>"', r'nats.inbox_prefix = "a.>": must be one to four subject tokens'),
        (
            "[site]\nname = 'x'\n[nats\n",
            r"line 3: Expected ']' at the end of a table declaration: \"\[nats\"",
        ),
        ("[site]\nname =", r"line 2: Invalid value"),
        ('[site]\nname = "a"\nname = "b"', r"line 3: Cannot overwrite a value"),
    ],
)
def test_an_error_names_the_file_the_place_and_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config(text, name="my.toml")

    assert re.search(r"my\.toml(: |, )" + words, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        '[nats]\npassword = "hunter2"',
        '[nats]\npassword = "hunter2',
        '[nats]\nurl = "nats://me:hunter2@127.0.0.1:4222"',
        '[nats]\nurl = "nats://hunter2@127.0.0.1:4222"',
        '[nats]\nurl = "nats://me:hunter2@[::1"',
        RUNTIME.replace("http://", "http://me:hunter2@"),
    ],
)
def test_an_error_never_repeats_a_secret(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decode_config(text)

    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "gpuq.toml").write_bytes(b'[site]\nname = "\xff"\n')

    with pytest.raises(ConfigError, match=r"gpuq.toml, line 2: not UTF-8"):
        load(tmp_path)


def test_a_file_far_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "gpuq.toml").write_bytes(b"#" * 1_000_001)

    with pytest.raises(ConfigError, match="larger than 1000000 bytes"):
        load(tmp_path)


def test_a_named_file_that_is_missing_is_an_error_and_not_the_defaults(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope.toml: no such file, named by --config"):
        load(tmp_path, given=Path("nope.toml"))
    with pytest.raises(ConfigError, match=r"gone.toml: no such file, named by \$GPUQ_CONFIG"):
        load(tmp_path, {"GPUQ_CONFIG": "gone.toml"})


def test_the_first_place_that_has_a_file_wins(tmp_path: Path) -> None:
    cwd, user = tmp_path / "cwd", tmp_path / "user"
    places = [cwd / "given.toml", cwd / "env.toml", cwd / "gpuq.toml", user / "gpuq.toml"]
    for place in places:
        place.parent.mkdir(exist_ok=True)
        place.touch()
    environ = {"GPUQ_CONFIG": "env.toml"}

    found = [
        find_config(Path("given.toml"), environ, cwd=cwd, user_folder=user),
        find_config(None, environ, cwd=cwd, user_folder=user),
        find_config(None, {}, cwd=cwd, user_folder=user),
        find_config(None, {}, cwd=tmp_path, user_folder=user),
        find_config(None, {}, cwd=tmp_path, user_folder=tmp_path),
    ]

    assert found == [*places, None]


def test_without_a_file_the_defaults_of_each_process_hold(tmp_path: Path) -> None:
    config = load(tmp_path)

    assert agent_config(config, machine_name="box.lan") == AgentConfig(host="box")
    assert scheduler_config(config) == SchedulerConfig()


def test_the_environment_stands_above_the_file_and_replaces_its_way_to_log_in(tmp_path: Path) -> None:
    (tmp_path / "gpuq.toml").write_text('[nats]\nurl = "nats://a:1"\nuser = "u"\npassword_file = "p"\ntls_ca = "ca"\n')
    environ = {"GPUQ_NATS_URL": "nats://b:2", "GPUQ_NATS_TOKEN_FILE": "t"}

    nats = load(tmp_path, environ).nats

    assert (nats.url, nats.user, nats.password_file) == ("nats://b:2", None, None)
    assert (nats.token_file, nats.tls_ca) == (str(tmp_path / "t"), str(tmp_path / "ca"))


def test_an_error_in_the_environment_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the defaults with GPUQ_NATS_URL: nats.url"):
        load(tmp_path, {"GPUQ_NATS_URL": "http://x"})


def test_paths_in_the_file_start_at_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "gpuq.toml").write_text('[nats]\nurl = "nats://a"\ntoken_file = "t"\n')

    assert load(tmp_path, given=Path("etc/gpuq.toml")).nats.token_file == str(folder / "t")


def test_a_deadline_remembers_the_file_that_gave_it(tmp_path: Path) -> None:
    (tmp_path / "gpuq.toml").write_text("[deadlines]\nrun_s = 7\n")

    loaded = load_config(None, {}, cwd=tmp_path, user_folder=tmp_path)
    scheduler = scheduler_config(loaded.config, deadline_sources=loaded.deadline_sources)

    assert scheduler.deadline_source("run_s") == f"{tmp_path}/gpuq.toml, deadlines.run_s"
    assert scheduler.deadline_source("load_s") == ""


def test_every_setting_reaches_the_process_that_uses_it() -> None:
    config = decode_config(
        '[site]\nname = "s"\n[host]\nname = "h"\n'
        "[agent]\nheartbeat_s = 1\nstop_grace_s = 2\nreading_timeout_s = 3\n"
        "find_devices = false\nfind_runtimes = false\n"
        '[[devices]]\nid = "cpu"\nsource = "cpu"\n' + RUNTIME + "[kinds.inference]\npriority = 5\n"
        "[deadlines]\nrun_s = 7\n[scheduler.weights]\nwarm = 8\n"
        "[scheduler]\nclaim_ttl_s = 9\nlease_ttl_s = 10\nsnapshot_every_events = 11\n"
        "forget_after_s = 12\nforget_above = 13\n"
    )

    agent, scheduler = agent_config(config, machine_name="other"), scheduler_config(config)

    assert (agent.host, agent.site, agent.heartbeat_s, agent.stop_grace_s) == ("h", "s", 1, 2)
    assert (agent.reading_timeout_s, agent.find_devices, agent.find_runtimes) == (3, False, False)
    assert [agent.devices[0].id, agent.runtimes[0].name] == ["cpu", "a"]
    assert (scheduler.site, scheduler.kinds.inference.priority, scheduler.deadlines.run_s) == ("s", 5, 7)
    assert (scheduler.weights.warm, scheduler.claim_ttl_s, scheduler.lease_ttl_s) == (8, 9, 10)
    assert (scheduler.snapshot_every_events, scheduler.forget_after_s, scheduler.forget_above) == (11, 12, 13)


@pytest.mark.parametrize(
    ("machine", "host"),
    [
        ("box", "box"),
        ("box.lan", "box"),
        ("my box!", "my-box"),
        ("ü", "host"),
        ("", "host"),
        ("a" * 99, "a" * 64),
    ],
)
def test_the_machines_name_becomes_a_subject_token(machine: str, host: str) -> None:
    assert host_name_from(machine) == host


def test_the_example_decodes_and_shows_the_true_defaults() -> None:
    text = EXAMPLE.read_text()

    config = decode_config(text)

    given: dict[str, Any] = tomllib.loads(text)
    for section in ("site", "nats", "server", "agent", "deadlines", "scheduler", "kinds"):
        assert getattr(config, section) == getattr(SiteConfig(), section), section
        assert given[section], f"the example leaves out {section}"


def test_the_examples_commented_settings_decode_too() -> None:
    uncommented = re.sub(r"(?m)^# ([a-z_]+ = )", r"\1", EXAMPLE.read_text())
    one_login = re.sub(r"(?m)^(token_file|creds_file) .*$", "", uncommented)

    config = decode_config(one_login)

    assert config.nats.password_file is not None
    assert (config.server.port, config.host.name) == (4222, "box")


@pytest.mark.parametrize("provider", ["vllm", "huggingface"])
def test_a_server_that_does_not_say_its_size_needs_none_where_it_is_on_a_cpu_only(provider: str) -> None:
    cpu = '[[devices]]\nid = "c"\nsource = "cpu"\n'

    decode_config(cpu + RUNTIME.replace("ollama", provider) + 'devices = ["c"]', name="my.toml")
    decode_config(RUNTIME.replace("ollama", provider) + "holds_mb = 8000", name="my.toml")
    with pytest.raises(ConfigError, match="holds_mb"):
        decode_config(cpu + RUNTIME.replace("ollama", provider) + 'devices = ["c", "GPU-1"]', name="my.toml")
