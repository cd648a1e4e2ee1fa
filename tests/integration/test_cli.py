"""Every command of `gpuq` against a real site: what it prints, what it prints with --json, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.session import user_token
from support.clisite import FAKE, FAKE_DEVICE_MB, HOST, REAL, CliSite, read_until, run_gpuq, stop

pytestmark = pytest.mark.processes


# --- submit


def test_a_submission_prints_its_id_and_the_answer(site: CliSite) -> None:
    ran = site.gpuq("submit", "--model", REAL, "--max-tokens", "3", "Hello")

    job_id, answer, *_ = ran.out.replace(";", " ").split()
    assert (ran.code, answer) == (Exit.OK, "accepted")
    assert site.gpuq("result", "--wait", job_id).code == Exit.OK


def test_a_submission_as_json_is_one_document(site: CliSite) -> None:
    ran = site.gpuq("submit", "--model", REAL, "--max-tokens", "3", "Hello", "--json", "--id", "json-1")

    assert ran.code == Exit.OK
    assert (ran.document["id"], ran.document["state"]) == ("json-1", "accepted")
    assert ran.document["seq"] > 0


def test_waiting_prints_the_text_of_the_result_and_nothing_else_on_stdout(site: CliSite) -> None:
    ran = site.gpuq("submit", "--wait", "--model", REAL, "--max-tokens", "8", "Hello", "--id", "wait-1")

    assert ran.code == Exit.OK
    assert len(ran.out.split()) >= 7
    assert ran.err.startswith("wait-1 accepted")
    assert site.gpuq("result", "wait-1").out == ran.out


def test_streamed_text_is_the_text_of_the_result(site: CliSite) -> None:
    ran = site.gpuq("submit", "--stream", "--model", REAL, "--max-tokens", "50", "Hello", "--id", "stream-1")

    assert ran.code == Exit.OK
    assert ran.out == site.gpuq("result", "stream-1").out


def test_streamed_json_lines_hold_every_piece_and_then_the_end(site: CliSite) -> None:
    ran = site.gpuq("submit", "--stream", "--json", "--model", REAL, "--max-tokens", "20", "Hello")
    *pieces, end = ran.documents

    assert ran.code == Exit.OK
    assert "".join(piece["text"] for piece in pieces) == end["result"]["text"]
    assert [piece["offset"] for piece in pieces] == [
        sum(len(before["text"]) for before in pieces[:place]) for place in range(len(pieces))
    ]
    assert (end["phase"], end["result"]["completion_tokens"]) == ("succeeded", 20)


def test_a_chat_answers_with_its_message(site: CliSite) -> None:
    messages = ("--message", "system:Be brief: please", "--message", "user:Hello")
    ran = site.gpuq("submit", "--wait", "--json", "--model", REAL, "--max-tokens", "5", *messages)

    assert ran.code == Exit.OK
    assert ran.document["result"]["message"]["role"] == "assistant"
    plain = site.gpuq("submit", "--wait", "--chat", "--model", REAL, "--max-tokens", "5", "Hello")
    assert (plain.code, len(plain.out.split())) == (Exit.OK, 5)


def test_embeddings_are_json_one_a_line(site: CliSite) -> None:
    ran = site.gpuq("submit", "--wait", "--model", REAL, "--embed", "one", "--embed", "two")

    assert ran.code == Exit.OK
    assert [len(row) for row in ran.documents] == [64, 64]


def test_a_job_may_come_from_a_file_or_stdin_with_options_over_it(site: CliSite, tmp_path: Path) -> None:
    job = {"model": REAL, "prompt": "from a file", "max_tokens": 40, "deadlines": {"run_s": 50}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    options = ("--max-tokens", "2", "--deadline", "idle=40")
    ran = site.gpuq("submit", "-f", str(tmp_path / "job.json"), "--wait", "--json", *options)
    status = site.gpuq("status", ran.document["id"], "--json").document
    piped = site.gpuq("submit", "-f", "-", "--wait", "--json", stdin=json.dumps(job).encode())

    assert ran.document["result"]["completion_tokens"] == 2
    assert piped.document["result"]["completion_tokens"] == 40
    assert {name: status["clocks"][name]["limit_s"] for name in ("run", "idle")} == {"run": 50, "idle": 40}
    assert status["clocks"]["run"]["source"] == "job deadlines.run_s"


def test_a_prompt_may_come_from_stdin(site: CliSite) -> None:
    with site.llama.repeating():
        ran = site.gpuq("submit", "--wait", "--model", FAKE, "-", stdin="from stdin ✓".encode())

    assert ran.out == "from stdin ✓\n"


def test_the_same_id_and_body_are_one_job_and_another_body_is_refused(site: CliSite) -> None:
    job = ("--model", REAL, "--max-tokens", "2", "--id", "twice")
    first, again, other = (site.gpuq("submit", *job, prompt, "--wait") for prompt in ("a", "a", "b"))

    assert (first.code, again.code, other.code) == (Exit.OK, Exit.OK, Exit.REFUSED)
    assert again.out == first.out
    assert "submitted before with the same body: still one job" in again.err
    assert "duplicate_id: id = 'twice'" in other.err


def test_a_body_of_two_megabytes_goes_through_the_object_store(site: CliSite) -> None:
    prompt = "x" * 2_000_000
    with site.llama.repeating():
        job = json.dumps({"model": FAKE, "prompt": prompt, "max_tokens": 7, "id": "big"}).encode()
        ran = site.gpuq("submit", "-f", "-", "--wait", stdin=job)
        again = site.gpuq("submit", "-f", "-", "--wait", stdin=job)
    (submitted,) = site.gpuq("events", "--job", "big", "--json", "--type", "submitted").documents

    assert ran.code == Exit.OK, ran.err
    assert ran.out == prompt + "\n"
    assert site.llama.until_asked(prompt)["n_predict"] == 7
    assert (submitted["data"]["body"]["size"] > 2_000_000, "prompt" in submitted["data"]) == (True, False)
    assert "still one job" in again.err


def test_a_job_that_ends_otherwise_is_exit_code_1_with_the_reason(site: CliSite) -> None:
    with site.llama.holding():
        ran = site.gpuq(
            "submit", "--wait", "--model", FAKE, "slowly", "--deadline", "run=0.3", "--json", "--id", "late"
        )

    assert ran.code == Exit.JOB_FAILED
    assert (ran.document["phase"], ran.document["clock"]) == ("expired", "run")
    assert "job late expired: run clock" in ran.err
    assert site.gpuq("result", "late").code == Exit.JOB_FAILED
    assert site.gpuq("watch", "late").code == Exit.JOB_FAILED


def test_a_wait_that_ends_first_is_exit_code_5_and_the_job_goes_on(site: CliSite) -> None:
    with site.llama.holding():
        ran = site.gpuq("submit", "--wait", "--timeout", "0.5", "--model", FAKE, "patience", "--id", "patient")
        phase = site.gpuq("status", "patient", "--json").document["phase"]

    assert (ran.code, phase) == (Exit.TIMED_OUT, "running")
    assert "has not ended within 0." in ran.err
    assert site.gpuq("result", "patient", "--wait").code == Exit.OK


def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back(site: CliSite) -> None:
    with site.llama.holding():
        process = site.popen("submit", "--wait", "--model", FAKE, "interrupted", "--id", "interrupted")
        try:
            read_until(process, "interrupted accepted")
            process.send_signal(signal.SIGINT)
            rest = read_until(process, "gpuq cancel interrupted")
            code = process.wait(30)
        finally:
            stop(process)
        phase = site.gpuq("status", "interrupted", "--json").document["phase"]

    assert code == Exit.INTERRUPTED
    assert "job interrupted goes on: come back with `gpuq result --wait interrupted`" in rest[-1]
    assert phase == "running"
    assert site.gpuq("result", "interrupted", "--wait").code == Exit.OK


def test_a_viewer_that_comes_late_gets_the_text_from_its_beginning(site: CliSite) -> None:
    with site.llama.holding():
        job_id = site.submit("--model", FAKE, "late viewer")
        site.llama.until_asked("late viewer")
        site.until_phase(job_id, "running")
        process = site.popen("result", "--stream", "--json", job_id)
        try:
            first = json.loads(read_until(process, '"text":"the"')[-1])
            site.llama.release()
            end = json.loads(read_until(process, '"phase"')[-1])
            code = process.wait(30)
        finally:
            stop(process)

    assert (first["offset"], first["text"], code) == (0, "the", Exit.OK)
    assert end["result"]["text"] == "the patient scheduler keeps its queue."


# --- one job


def test_a_waiting_job_shows_its_place_and_why_it_waits(site: CliSite) -> None:
    with site.llama.holding():
        running = site.submit("--model", FAKE, "first in line")
        site.until_phase(running, "running")
        waiting = [site.submit("--model", FAKE, name) for name in ("second", "third")]
        urgent = site.submit("--model", FAKE, "urgent", "--priority", "5")
        document = site.gpuq("status", waiting[1], "--json").document
        lines = site.gpuq("status", waiting[1]).out
        queue = site.gpuq("queue", "--json").document
        table = site.gpuq("queue").out
        cancelled = [site.gpuq("cancel", each, "--reason", "a test") for each in (*waiting, urgent)]

    assert document["queue"] == {"place": 3, "ahead": 2, "length": 3}
    assert (document["phase"], document["reason"]) == ("waiting", "capacity")
    assert "place 3 of 3" in lines
    assert "capacity: every device that could take it is in use" in lines
    assert [job["id"] for job in queue["waiting"]] == [urgent, *waiting]
    assert [(job["id"], job["phase"], job["device"]) for job in queue["running"]] == [(running, "running", "slow")]
    assert table.startswith("3 waiting\n#  job ")
    assert [(ran.code, ran.out.partition(" ")[2]) for ran in cancelled] == [
        (Exit.OK, f"cancelled by {user_token()}: a test\n")
    ] * 3
    assert site.gpuq("result", running, "--wait").code == Exit.OK


def test_the_status_of_a_job_that_ended_has_its_attempts_and_times(site: CliSite) -> None:
    job_id = site.submit("--model", REAL, "--max-tokens", "3", "Hello", "--vram-mb", "10", "--priority", "2")
    site.gpuq("result", "--wait", job_id)
    document = site.gpuq("status", job_id, "--json").document
    lines = site.gpuq("status", job_id).out

    assert (document["phase"], document["model"], document["task"]) == ("succeeded", REAL, "generate")
    (attempt,) = document["attempts"]
    assert (attempt["host"], attempt["device"], attempt["outcome"]) == (HOST, "cpu", "succeeded")
    assert document["times"].keys() >= {"submitted", "accepted", "started", "ended", "waited_s", "run_s", "total_s"}
    assert f"generate with {REAL} (needs 10 MB)" in lines
    assert "kind inference, priority 2" in lines


@pytest.mark.parametrize("command", ["status", "result", "watch", "cancel"])
def test_a_job_that_does_not_exist_is_exit_code_6(site: CliSite, command: str) -> None:
    ran = site.gpuq(command, "nobody", "--json")

    assert ran.code == Exit.NOT_FOUND
    assert ran.document["error"]["code"] == "not_found"
    assert ran.err.startswith("gpuq: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "result", "watch", "cancel"])
def test_an_id_that_can_be_none_is_exit_code_2(site: CliSite, command: str) -> None:
    for job_id in ("a.b", "a*", "a b", ">", "x" * 300):
        ran = site.gpuq(command, job_id)
        assert (ran.code, ran.err.count("\n")) == (Exit.USAGE, 1)
        assert "must be 1 to 64 of A-Z a-z 0-9 _ -" in ran.err


def test_a_job_without_a_result_yet_is_exit_code_6(site: CliSite) -> None:
    with site.llama.holding():
        job_id = site.submit("--model", FAKE, "no result yet")
        ran = site.gpuq("result", job_id)
        bounded = site.gpuq("result", job_id, "--wait", "--timeout", "0.2")
        waiting = site.popen("result", job_id, "--wait")
    try:
        read = read_until(waiting, "queue.")
    finally:
        stop(waiting)

    assert (ran.code, bounded.code) == (Exit.NOT_FOUND, Exit.TIMED_OUT)
    assert read == ["the patient scheduler keeps its queue."]


def test_a_running_job_is_cancelled_once_its_runtime_has_stopped(site: CliSite) -> None:
    with site.llama.holding():
        job_id = site.submit("--model", FAKE, "cancel me")
        site.until_phase(job_id, "running")
        ran = site.gpuq("cancel", job_id, "--reason", "enough", "--json", "--timeout", "30")
    again = site.gpuq("cancel", job_id, "--json")

    assert ran.code == Exit.OK
    assert (ran.document["state"], ran.document["id"]) == ("cancelled", job_id)
    assert again.code == Exit.REFUSED
    assert again.document["error"]["fields"]["reason"] == "already_ended"


def test_a_cancel_that_takes_longer_than_the_wait_says_that_it_was_requested(site: CliSite) -> None:
    with site.llama.holding(), site.llama.busy():
        job_id = site.submit("--model", FAKE, "cancel me later")
        site.until_phase(job_id, "running")
        ran = site.gpuq("cancel", job_id, "--timeout", "3")
        status = site.gpuq("status", job_id).out

    assert ran.code == Exit.OK
    assert "cancel requested; it has not ended within 3 s" in ran.out
    assert f"cancel     requested by {user_token()}" in status
    assert site.gpuq("result", "--wait", job_id).code == Exit.JOB_FAILED


def test_watching_a_job_shows_all_of_it_up_to_its_end(site: CliSite) -> None:
    job_id = site.submit("--model", REAL, "--max-tokens", "2", "Hello")
    ran = site.gpuq("watch", job_id)
    events = site.gpuq("watch", job_id, "--json")

    assert (ran.code, events.code) == (Exit.OK, Exit.OK)
    types = [event["type"].split(".")[-2] for event in events.documents]
    assert types == [
        "submitted",
        "accepted",
        "routed",
        "claimed",
        "admitted",
        "placement_verified",
        "started",
        "succeeded",
    ]
    assert len(ran.out.splitlines()) == 1 + len(types)


def test_watching_the_site_shows_what_happens_from_now_on(site: CliSite) -> None:
    process = site.popen("watch")
    lines = site.popen("watch", "--json", "--all")
    try:
        for watcher in (process, lines):
            read_until(watcher, "watching what comes after event")
        job_id = site.submit("--model", REAL, "--max-tokens", "2", "Hello")
        seen = read_until(process, "succeeded")
        released = read_until(lines, "released")
        for watcher in (process, lines):
            watcher.send_signal(signal.SIGINT)
        codes = [process.wait(30), lines.wait(30)]
    finally:
        stop(process)
        stop(lines)

    assert [line.split("  ")[1] for line in seen] == [job_id] * 3
    assert "routed" in "".join(released)
    assert codes == [Exit.INTERRUPTED] * 2


# --- the site


def test_devices_show_slots_memory_runtimes_and_the_last_heartbeat(site: CliSite) -> None:
    document = site.gpuq("devices", "--json").document
    table = site.gpuq("devices").out

    (host,) = document["hosts"]
    devices = {device["device"]: device for device in host["devices"]}
    runtimes = {runtime["runtime"]: runtime for runtime in host["runtimes"]}
    assert (host["host"], host["agent"]) == (HOST, "live")
    assert host["heartbeat_s"] < 60
    assert (devices["slow"]["total_mb"], devices["slow"]["slots"]) == (FAKE_DEVICE_MB, 1)
    assert devices["cpu"]["free_mb"] > 0
    assert runtimes["llama"]["healthy"]
    assert REAL in runtimes["llama"]["models"]
    assert f"{HOST}/slow" in table
    assert f"{HOST}/llama" in table


@pytest.mark.parametrize("command", ["queue", "devices"])
def test_a_screen_that_is_watched_is_drawn_again_and_again(site: CliSite, command: str) -> None:
    drawn = site.popen(command, "--watch")
    lines = site.popen(command, "--watch", "--json")
    heading = "0 waiting" if command == "queue" else "device "
    try:
        for _ in range(2):
            read_until(drawn, heading)
            assert read_until(lines, '"seq"')
        for process in (drawn, lines):
            process.send_signal(signal.SIGINT)
        codes = [drawn.wait(30), lines.wait(30)]
    finally:
        stop(drawn)
        stop(lines)

    assert codes == [Exit.INTERRUPTED] * 2


def test_events_are_filtered_and_come_with_the_time_between(site: CliSite) -> None:
    job_id = site.submit("--model", REAL, "--max-tokens", "2", "Hello", "--producer", "lab")
    site.gpuq("result", "--wait", job_id)
    table = site.gpuq("events", "--job", job_id).out.splitlines()
    of_type = site.gpuq("events", "--job", job_id, "--type", "job.*", "--json").documents
    by_full_type = site.gpuq("events", "--job", job_id, "--type", "gpuq.job.started.v1", "--json").documents
    of_device = site.gpuq("events", "--device", f"{HOST}/cpu", "--json", "--limit", "2").documents
    of_host = site.gpuq("events", "--host", HOST, "--json").documents
    of_producer = site.gpuq("events", "--producer", "lab", "--json").documents

    assert table[0].split() == ["seq", "time", "after", "type", "about"]
    assert " +" in table[2]
    assert [event["type"] for event in by_full_type] == ["gpuq.job.started.v1"]
    assert {event["type"].split(".")[1] for event in of_type} == {"job"}
    assert {event["natssubject"] for event in of_device} == {f"gpuq.ev.device.{HOST}.cpu"}
    assert len(of_device) == 2
    assert {event["natssubject"].split(".")[3] for event in of_host} == {HOST}
    assert {"gpuq.job.submitted.v1", "gpuq.job.accepted.v1"} <= {event["type"] for event in of_producer}


def test_events_may_be_asked_for_by_sequence_and_by_time(site: CliSite) -> None:
    everything = site.gpuq("events", "--limit", "0", "--json").documents
    by_seq = site.gpuq("events", "--since", "3", "--until", "5", "--json").documents
    since_long_ago = site.gpuq("events", "--since", "2h", "--until", "2020-01-01T00:00:00Z", "--json").documents
    from_time = site.gpuq("events", "--since", everything[4]["storedat"], "--limit", "0", "--json").documents
    newest = site.gpuq("events", "--limit", "2", "--json").documents

    assert [event["seq"] for event in by_seq] == [3, 4, 5]
    assert since_long_ago == []
    assert from_time[0]["seq"] <= 5
    assert [event["seq"] for event in newest] == [event["seq"] for event in everything[-2:]]
    assert all(event["specversion"] == "1.0" for event in everything)


def test_events_that_are_followed_go_on_with_what_happens(site: CliSite) -> None:
    process = site.popen("events", "--follow", "--limit", "1", "--type", "job.*")
    try:
        read_until(process, "seq")
        job_id = site.submit("--model", REAL, "--max-tokens", "2", "Hello")
        read_until(process, f"{job_id}: succeeded")
        process.send_signal(signal.SIGINT)
        code = process.wait(30)
    finally:
        stop(process)

    assert code == Exit.INTERRUPTED


def test_a_reader_that_has_seen_enough_is_no_error(site: CliSite) -> None:
    read_end, write_end = os.pipe()
    process = site.popen("events", "--limit", "0", stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    try:
        assert process.wait(30) == Exit.OK
    finally:
        stop(process)


def test_on_a_terminal_tables_are_drawn_in_place_and_text_is_made_harmless(site: CliSite) -> None:
    with site.llama.repeating():
        job_id = site.submit("--model", FAKE, "red \x1b[31m and bell \x07 and [bold]no markup[/bold]")
        site.gpuq("result", "--wait", job_id)
    text = on_terminal(site, "result", job_id)
    queue = on_terminal(site, "queue", "--watch", until=b"0 waiting")
    devices = on_terminal(site, "devices")

    assert text == b"red \\x1b[31m and bell \\x07 and [bold]no markup[/bold]\r\n"
    assert b"\x1b[?25l" in queue  # the cursor is hidden while it is drawn again and again
    assert f"{HOST}/cpu".encode() in devices


def on_terminal(site: CliSite, *arguments: str, until: bytes | None = None) -> bytes:
    """What a command writes to a terminal, all of it or up to ``until`` for one that does not end."""
    leader, follower = os.openpty()
    process = site.popen(*arguments, stdout=follower, stderr=subprocess.DEVNULL)
    os.close(follower)
    seen = b""
    try:
        while until is None or until not in seen:
            try:
                piece = os.read(leader, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            seen += piece
    finally:
        stop(process)
        os.close(leader)
    return seen


# --- the machine


def test_doctor_says_what_is_wrong_with_exit_code_7_and_nothing_with_0(site: CliSite, tmp_path: Path) -> None:
    well = site.gpuq("doctor", "--json")
    (tmp_path / "gpuq.toml").write_text("[sit]\n")
    wrong = run_gpuq("doctor", "--config", str(tmp_path / "gpuq.toml"), "--data", str(site.data))

    assert (well.code, well.document["ok"]) == (Exit.OK, True)
    assert wrong.code == Exit.MISCONFIGURED
    assert "WRONG  configuration" in wrong.out
    assert "did you mean site?" in wrong.out


def test_the_options_that_name_the_site_stand_before_or_after_the_command(site: CliSite) -> None:
    before = run_gpuq(*site.where(), "queue", "--json")
    after = run_gpuq("queue", "--json", *site.where())

    assert (before.code, after.code) == (Exit.OK, Exit.OK)


def test_a_site_that_is_not_there_is_exit_code_4(tmp_path: Path) -> None:
    nowhere = run_gpuq("queue", "--json", "--nats", "nats://127.0.0.1:9")
    never = run_gpuq("queue", "--data", str(tmp_path))

    assert (nowhere.code, never.code) == (Exit.UNAVAILABLE, Exit.UNAVAILABLE)
    assert nowhere.document["error"]["code"] == "log_unavailable"
    assert "no `gpuq up` has run with this data folder" in never.err


def test_a_wrong_configuration_is_exit_code_7(tmp_path: Path) -> None:
    (tmp_path / "gpuq.toml").write_text("nats = 3\n")
    ran = run_gpuq("queue", "--config", str(tmp_path / "gpuq.toml"), "--json")

    assert ran.code == Exit.MISCONFIGURED
    assert ran.document["error"]["code"] == "config"


def test_up_says_what_it_found_and_how_to_begin(site: CliSite) -> None:
    said = (site.folder / "up.out").read_text()

    assert "gpuq is up at nats://127.0.0.1:" in said
    assert f"host {HOST}, devices: cpu (host memory, " in said
    assert "first job:  gpuq --config" in said


def test_a_second_up_over_the_same_folder_is_exit_code_7(site: CliSite) -> None:
    ran = site.gpuq("up")

    assert ran.code == Exit.MISCONFIGURED
    assert "is held by process" in ran.err
