"""Drains, pins, wishes and previews against a real site: what is printed, what stands in the log, and exit codes."""

from __future__ import annotations

import pytest

from gpukeeper.cli.exitcodes import Exit
from gpukeeper.cli.session import user_token
from support.clisite import FAKE, FAKE_DEVICE_MB, HOST, CliSite

pytestmark = pytest.mark.processes


def test_a_drained_device_takes_nothing_until_it_is_resumed(site: CliSite) -> None:
    drained = site.gpuq("drain", HOST, "slow", "--reason", "new fan")
    try:
        shown = site.gpuq("devices", "--json").document["hosts"][0]["devices"]
        preview = site.gpuq("preview", "--model", FAKE, "--vram-mb", "10", "--device", f"{HOST}/slow", "--json")
    finally:
        resumed = site.gpuq("resume", f"{HOST}/slow", "--json")
    again = site.gpuq("preview", "--model", FAKE, "--vram-mb", "10", "--device", f"{HOST}/slow", "--json")

    assert (drained.code, drained.out) == (
        Exit.OK,
        f"{HOST}/slow taken out of service by {user_token()}: new fan\n",
    )
    assert {each["device"]: each["drained"] for each in shown} == {
        "slow": f"by {user_token()}: new fan",
        "cpu": None,
    }
    (place,) = preview.document["places"]
    assert (preview.code, preview.document["outcome"], place["reason"]) == (Exit.NO_ROOM, "denied", "drained")
    assert (resumed.code, resumed.document["state"], resumed.document["name"]) == (Exit.OK, "resumed", "slow")
    assert (again.code, again.document["outcome"]) == (Exit.OK, "starts")


def test_a_pin_is_shown_until_it_is_taken_away(site: CliSite) -> None:
    def pins() -> list[str]:
        (host,) = site.gpuq("devices", "--json").document["hosts"]
        return next(each["pins"] for each in host["runtimes"] if each["runtime"] == "fake")

    pinned = site.gpuq("pin", HOST, "fake", FAKE, "--reason", "demo at noon")
    all_of_it = site.gpuq("pin", f"{HOST}/fake", "--json")
    both = pins()
    unpinned = [site.gpuq("unpin", f"{HOST}/fake", *model, "--json") for model in ((), (FAKE,))]

    assert (pinned.code, pinned.out) == (Exit.OK, f"{HOST}/fake pinned {FAKE}, by {user_token()}: demo at noon\n")
    assert (all_of_it.document["state"], sorted(both)) == ("pinned", ["*", FAKE])
    assert [(ran.code, ran.document["state"]) for ran in unpinned] == [(Exit.OK, "unpinned")] * 2
    assert pins() == []


@pytest.mark.parametrize(
    ("command", "reason", "code"),
    [
        (("drain", "nobody", "gpu0"), "unknown_host", Exit.NOT_FOUND),
        (("resume", HOST, "gpu9"), "unknown_device", Exit.NOT_FOUND),
        (("reclaim", HOST, "gpu9"), "unknown_device", Exit.NOT_FOUND),
        (("reclaim", HOST, "slow", "--runtime", "nobody"), "unknown_runtime", Exit.NOT_FOUND),
        (("pin", HOST, "nobody"), "unknown_runtime", Exit.NOT_FOUND),
        (("runtime", "restart", HOST, "fake"), "no_container", Exit.REFUSED),
    ],
)
def test_a_refused_command_says_why_in_a_sentence_and_in_json(
    site: CliSite, command: tuple[str, ...], reason: str, code: Exit
) -> None:
    ran = site.gpuq(*command, "--json")

    assert (ran.code, ran.document["error"]["fields"]["reason"]) == (code, reason)
    assert (ran.err.startswith("gpuq: "), ran.err.count("\n")) == (True, 1)
    assert f"{reason}: " in ran.err


def test_a_wish_to_free_memory_stands_in_the_log_and_its_agent_has_the_last_word(site: CliSite) -> None:
    enough = site.gpuq("reclaim", HOST, "slow", "--vram-mb", "10", "--reason", "a test", "--json")
    too_much = site.gpuq("reclaim", f"{HOST}/slow", "--vram-mb", str(FAKE_DEVICE_MB + 1))
    wanted = site.gpuq("events", "--device", f"{HOST}/slow", "--type", "device.reclaim_wanted", "--json").documents

    assert [each["data"]["vram_mb"] for each in wanted] == [10, FAKE_DEVICE_MB + 1]
    assert {each["actor"] for each in wanted} == {user_token()}
    assert (enough.code, enough.document["state"], enough.document["reason"]) == (Exit.OK, "freed", "not_needed")
    assert [each["type"] for each in enough.document["events"]] == ["device.reclaim_wanted", "device.reclaim_refused"]
    assert too_much.code == Exit.REFUSED
    assert "insufficient: " in too_much.out
    assert too_much.out.count("fake (?) stays, other_device") == 1
    assert too_much.out.endswith(f"freed as measured: 0 MB; wanted usable: {FAKE_DEVICE_MB + 1} MB\n")


def test_a_preview_says_what_would_happen_and_leaves_no_event_and_no_job(site: CliSite) -> None:
    before = site.gpuq("events", "--limit", "0", "--json").documents
    fits = site.gpuq("preview", "--model", FAKE, "--vram-mb", "10")
    resident = site.gpuq("preview", "--model", FAKE, "--runtime", "fake", "--json")
    missing = site.gpuq("preview", "--model", "nobody-has-it", "--vram-mb", "1", "--json")
    nowhere = site.gpuq("preview", "--model", FAKE, "--host", "nobody", "--json")
    no_device = site.gpuq("preview", "--model", FAKE, "--device", "gpu9", "--json")
    after = site.gpuq("events", "--limit", "0", "--json").documents

    assert (fits.code, "it would start now" in fits.out, "Read " in fits.out) == (Exit.OK, True, True)
    assert fits.out.endswith("This is a preview: nothing was released and nothing started.\n")
    assert (resident.code, resident.document["outcome"]) == (Exit.OK, "starts")
    assert resident.document["agents"] == {HOST: "live"}
    assert resident.document["places"][0]["resident"]
    assert missing.code == Exit.NO_ROOM
    assert {each["reason"] for each in missing.document["places"]} == {"model_missing"}
    assert (nowhere.code, nowhere.document["error"]["fields"]["reason"]) == (Exit.NOT_FOUND, "unknown_host")
    assert (no_device.code, no_device.document["error"]["fields"]["reason"]) == (Exit.NOT_FOUND, "unknown_device")
    assert after == before


def test_the_devices_show_who_holds_their_memory(site: CliSite) -> None:
    document = site.gpuq("devices", "--json").document
    table = site.gpuq("devices").out

    devices = {each["device"]: each for each in document["hosts"][0]["devices"]}
    assert sum(part["mb"] or 0 for part in devices["slow"]["held"]) == FAKE_DEVICE_MB
    assert "J our jobs  r reserved" in table
    assert "free " in table
