# SPDX-License-Identifier: Apache-2.0
"""Two nodes whose interfaces NetworkManager manages, as on a Spark with its desktop: real nmcli, real profiles."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import bed
import cables
import pair
import pytest

pytestmark = pytest.mark.full
PROFILES = [f"netplan-{port}" for port in cables.PORT1]
INSTALL = (
    "systemctl disable --now systemd-networkd.socket systemd-networkd.service;"
    "apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends install"
    " network-manager && systemctl enable --now NetworkManager.service"
)


@pytest.fixture(scope="module")
def managed() -> Iterator[cables.Run]:
    """A bed of its own, on which NetworkManager has taken the place of systemd-networkd; the first run there."""
    with pytest.MonkeyPatch.context() as patch:
        state = bed.STATE.with_name(f"{bed.STATE.name}-nm")
        patch.setenv("TWIN_PREFIX", f"{bed.PREFIX}nm")
        patch.setenv("TWIN_STATE", str(state))
        patch.setattr(bed, "STATE", state)
        subprocess.run([bed.ROOT / "twin/twin.sh", "up"], check=True, env=os.environ)
        for node in cables.NODES:
            bed.on(node, "sh", "-c", INSTALL, timeout=300)
        run = cables.network()
        assert run.status == 0, run.failures()
        yield run
        subprocess.run([bed.ROOT / "twin/twin.sh", "clean"], check=True, env=os.environ)


def active(node: str) -> dict[str, str]:
    """Interface to the name of its active profile; loopback left out."""
    lines = bed.on(node, "nmcli", "-t", "-f", "DEVICE,NAME", "connection", "show", "--active").splitlines()
    return dict(line.split(":", 1) for line in lines if not line.startswith("lo:"))


def profiled(node: str) -> bool:
    """Whether our two profiles hold the rails, with our addresses, and eth0 is left as it was."""
    return active(node) == dict(zip(cables.PORT1, PROFILES, strict=True)) | {"eth0": "eth0"} and cables.right(node)


def test_our_profiles_are_up_and_nothing_else_is_touched(managed: cables.Run) -> None:
    for node in cables.NODES:
        assert profiled(node)
        assert "renderer: NetworkManager" in bed.on(node, "cat", cables.OURS)
        assert bed.on(node, "sh", "-c", "systemctl is-active systemd-networkd.service || :").strip() == "inactive"
    again = cables.network("--diff")
    assert again.status == 0 and again.changed() == {} and again.differences() == []


def test_a_profile_that_is_down_is_brought_up(managed: cables.Run) -> None:
    bed.on(bed.WORKER, "nmcli", "connection", "down", PROFILES[0])
    bed.on(bed.WORKER, "ip", "link", "set", "dev", cables.PORT1[1], "mtu", "1500")
    assert not cables.right(bed.WORKER)
    run = cables.network()
    assert run.status == 0, run.failures()
    assert run.changed() == {bed.WORKER: ["Address the rails"]} and profiled(bed.WORKER)


def test_what_is_not_confirmed_is_undone(managed: cables.Run) -> None:
    cutting = [{"subnet": f"{bed.NET}.0/25"}, {"subnet": "192.168.178.0/24"}]
    before = {node: bed.on(node, "cat", cables.OURS) for node in cables.NODES}
    run = cables.network(cx7_network_rails=cutting, cx7_network_allow_management=True)
    said = " ".join(cables.refusals(run))
    assert run.total("failures") == dict.fromkeys(cables.NODES, 1), said
    assert "are as they were before: no confirmation came in time" in said
    for node in cables.NODES:
        assert bed.on(node, "cat", cables.OURS) == before[node] and profiled(node)


def test_the_profiles_come_back_after_a_reboot(managed: cables.Run) -> None:
    for node in cables.NODES:
        bed.twin("kill", node)
    bed.twin("up")
    for node in cables.NODES:
        pair.wait_for(lambda node=node: cables.right(node), 60, "the rails of a node that booted")
        assert profiled(node)


def test_what_nmcli_set_up_is_adopted(managed: cables.Run) -> None:
    for node in cables.NODES:
        bed.on(node, "sh", "-c", f"rm {cables.OURS}; netplan generate; nmcli connection reload")
        for number, port in enumerate(cables.PORT1):
            address = f"ipv4.method manual ipv4.addresses 192.168.{100 + number}.{cables.HOST[node]}/24"
            profile = f"con-name rail{number} ifname {port} 802-3-ethernet.mtu 9000 ipv6.method disabled"
            bed.on(node, "sh", "-c", f"nmcli connection add type ethernet {profile} {address}")
            bed.on(node, "nmcli", "connection", "up", f"rail{number}")
    run = cables.network()
    assert run.status == 0, run.failures()
    files = [f"/etc/NetworkManager/system-connections/rail{number}.nmconnection (nmcli's)" for number in (0, 1)]
    found = cables.record(bed.HEAD)
    assert found["adopted"] and found["files"] == dict.fromkeys(cables.NODES, files) and found["warnings"] == []
    for node in cables.NODES:
        assert active(node) == {cables.PORT1[0]: "rail0", cables.PORT1[1]: "rail1", "eth0": "eth0"}
        assert bed.on(node, "ls", "/etc/netplan") == ""
