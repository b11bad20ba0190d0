# SPDX-License-Identifier: Apache-2.0
"""A change of the rails is confirmed from outside, or undone; uninstall gives everything back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import bed
import cables
import pair
import pytest

# A subnet that holds the controller and is narrower than the management network: its route goes first.
CUTTING = [{"subnet": f"{bed.NET}.0/25"}, {"subnet": "192.168.178.0/24"}]
ETH0 = "network: {version: 2, ethernets: {eth0: {dhcp4: true}}}\n"


def test_what_would_touch_management_asks_for_consent(ours: None) -> None:
    said = cables.refusals(cables.network(cx7_network_rails=CUTTING))
    assert len(said) == 1 and "is also the network of eth0" in said[0] and "cx7_network_allow_management" in said[0]


@pytest.mark.full
def test_a_change_that_cuts_management_is_undone(ours: None) -> None:
    """The nodes are cut off for real; a minute later they are as before, and the run says so."""
    text = {node: bed.on(node, "cat", cables.OURS) for node in cables.NODES}
    run = cables.network(cx7_network_rails=CUTTING, cx7_network_allow_management=True)
    assert run.total("failures") == dict.fromkeys(cables.NODES, 1) and not run.total("dark")
    for node, messages in run.failures().items():
        assert messages == [
            f"{node}: the rails could not be configured and are as they were before: no confirmation came in time over "
            "a new management connection, so the change may have cut it."
        ]
        assert bed.on(node, "cat", cables.OURS) == text[node] and cables.right(node)
    assert cables.network().changed() == {}


@pytest.mark.full
def test_a_change_whose_keeper_dies_is_undone_at_once(ours: None) -> None:
    """Nobody has to wait for the minute when the unit that waits is killed, as a shutdown does."""
    with ThreadPoolExecutor(1) as background:
        run = background.submit(cables.network, cx7_network_rails=CUTTING, cx7_network_allow_management=True)
        for node in cables.NODES:
            pair.wait_for(lambda node=node: not cables.right(node), 200, "the change")
            bed.on(node, "systemctl", "kill", "--signal=KILL", "glm-vllm-network-change")
            pair.wait_for(lambda node=node: cables.right(node), 15, "the way back")
        assert run.result().status != 0


@pytest.mark.full
def test_an_edit_that_was_never_applied_is_not_applied_by_us(ours: None) -> None:
    path = "/etc/netplan/50-eth0.yaml"
    bed.on(bed.HEAD, "sh", "-c", 'umask 077; printf %s "$1" > "$2"', "write", ETH0, path)
    bed.on(bed.HEAD, "ip", "address", "del", "192.168.177.11/24", "dev", cables.PORT1[0])
    try:
        said = cables.refusals(cables.network())
    finally:
        bed.on(bed.HEAD, "rm", path)
    assert len(said) == 1 and "10-netplan-eth0.network" in said[0] and "never applied" in said[0]


@pytest.mark.full
def test_a_file_that_netplan_rejects_stops_the_run(ours: None) -> None:
    path = "/etc/netplan/90-NM-broken.yaml"
    bed.on(bed.HEAD, "sh", "-c", 'umask 077; printf %s "$1" > "$2"', "write", "network: [eth0: {\n", path)
    bed.on(bed.HEAD, "ip", "address", "del", "192.168.177.11/24", "dev", cables.PORT1[0])
    try:
        said = cables.refusals(cables.network())
    finally:
        bed.on(bed.HEAD, "rm", path)
    assert len(said) == 1 and "netplan rejects our file merged with the others" in said[0] and path in said[0]


@pytest.mark.full
def test_uninstall_gives_every_file_back_and_keeps_later_edits_of_etc_hosts(
    ours: None, untouched: dict[str, str]
) -> None:
    """Fails when a byte or a mode is not as it was before the first run, or when what somebody added is gone."""
    for node in cables.NODES:
        bed.on(node, "sh", "-c", "echo '192.0.2.1 later' >> /etc/hosts")
    run = pair.run_playbook("playbooks/uninstall.yml")
    assert run.status == 0, run.failures()
    for node in cables.NODES:
        made = f"127.0.0.1 localhost\n127.0.1.1 {node}\n"
        assert bed.on(node, "cat", "/etc/hosts") == made + "192.0.2.1 later\n"
        left = bed.on(node, "sh", "-c", "ls -d /etc/glm-vllm /etc/netplan/*cx7* /etc/*/*.d/60-glm* 2>/dev/null || :")
        assert left == ""
        bed.on(node, "sed", "-i", "/later/d", "/etc/hosts")
        assert not untouched or cables.files(node) == untouched[node]


@pytest.mark.full
def test_without_netplan_systemd_networkd_is_configured(ours: None) -> None:
    for node in cables.NODES:
        bed.on(node, "sh", "-c", f"rm -f {cables.OURS}; netplan generate; networkctl reload")
        for port in cables.PORT1:
            bed.on(node, "ip", "address", "flush", "dev", port)
        bed.on(node, "mv", "/usr/sbin/netplan", "/usr/sbin/netplan.away")
    try:
        run = cables.network()
        assert run.status == 0, run.failures()
        for node in cables.NODES:
            assert cables.right(node)
            assert "60-glm-vllm-enp1s0f1np1.network" in bed.on(node, "ls", "/etc/systemd/network")
        assert cables.network().changed() == {}
    finally:
        for node in cables.NODES:
            bed.on(node, "sh", "-c", "mv /usr/sbin/netplan.away /usr/sbin/netplan")
    assert cables.network().status == 0
    for node in cables.NODES:
        assert "glm-vllm" not in bed.on(node, "ls", "/etc/systemd/network")
