"""Containers of processes, by their control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpukeeper.agents.devices.containers import container_in, container_of, sees_host_pids

ID = "3f4e1d2c" * 8
OTHER = "9a8b7c6d" * 8
HOST_NAMESPACE = "pid:[4026531836]"


def proc(folder: Path, namespace: str | None = HOST_NAMESPACE, **cgroups: str) -> Path:
    """A made-up ``/proc``: processes ``p<pid>`` and the control groups they are in."""
    if namespace is not None:
        (folder / "self" / "ns").mkdir(parents=True)
        (folder / "self" / "ns" / "pid").symlink_to(namespace)
    for name, text in cgroups.items():
        (folder / name[1:]).mkdir()
        (folder / name[1:] / "cgroup").write_text(text)
    return folder


@pytest.mark.parametrize(
    "text",
    [
        f"0::/system.slice/docker-{ID}.scope\n",
        f"12:devices:/docker/{ID}\n11:cpu:/docker/{ID}\n0::/system.slice/containerd.service\n",
        f"0::/docker/{ID}\n",
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n",
        f"0::/kubepods/besteffort/pod0a1b2c3d-0000-0000-0000-000000000000/{ID}\n",
        f"0::/kubepods/burstable/pod1/cri-containerd:{ID}\n",
        f"0::/kubepods.slice/crio-{ID}.scope\n",
        f"0::/machine.slice/libpod-{ID}.scope/container\n",
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope\n",
        f"0::/default/{ID}\n",
        f"0::/system.slice/nerdctl-{ID}.scope\n",
        f"0::/docker/{ID}/docker/{OTHER}\n",
        f"0::/system.slice/docker-{ID}.scope/init.scope\n",
    ],
)
def test_the_group_names_the_container_and_the_outermost_of_several(text: str) -> None:
    assert container_in(text) == ID


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0::/\n",
        "0::/init.scope\n",
        "0::/user.slice/user-1000.slice/session-2.scope\n",
        "0::/system.slice/docker.service\n",
        f"0::/machine.slice/libpod-conmon-{ID}.scope\n",
        f"0::/machine.slice/crio-conmon-{ID}.scope\n",
        f"0::/docker/{ID[:-1]}\n",
        f"0::/docker/{ID}0\n",
        f"0::/docker/{ID.upper()}\n",
        f"/docker/{ID}\n",
        "\x00\xff:::\n:::",
    ],
)
def test_what_names_no_container_is_none(text: str) -> None:
    assert container_in(text) is None


def test_a_process_is_found_by_the_pid_of_the_host(tmp_path: Path) -> None:
    folder = proc(tmp_path, p42=f"0::/system.slice/docker-{ID}.scope\n", p43="0::/init.scope\n")

    assert container_of(42, proc=folder) == ID
    assert container_of(43, proc=folder) is None


def test_a_process_that_has_ended_or_may_not_be_looked_at_is_none(tmp_path: Path) -> None:
    folder = proc(tmp_path)
    (folder / "7" / "cgroup").mkdir(parents=True)

    assert container_of(42, proc=folder) is None
    assert container_of(7, proc=folder) is None


@pytest.mark.parametrize("namespace", ["pid:[4026532001]", None])
def test_inside_a_container_a_pid_of_the_host_is_never_taken_for_a_process_of_the_same_number(
    tmp_path: Path, namespace: str | None
) -> None:
    folder = proc(tmp_path, namespace, p42=f"0::/docker/{ID}\n")

    assert not sees_host_pids(folder)
    assert container_of(42, proc=folder) is None
