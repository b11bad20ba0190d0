# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the cables or their addresses: adopted, repaired, or one sentence."""

from __future__ import annotations

import bed
import cables
import pair
import pytest


def test_new_nodes_get_their_rails(first_run: cables.Run) -> None:
    """Fails when a rail lacks its address or MTU, a frame is cut, or the own name is a loopback address."""
    for node in cables.NODES:
        assert cables.right(node)
        assert bed.on(node, "getent", "hosts", node).split()[0] == f"192.168.177.{cables.HOST[node]}"
        assert bed.on(node, "stat", "-c", "%a %U", cables.OURS).split() == ["600", "root"]
    found = cables.record(bed.HEAD)
    assert found == cables.record(bed.WORKER) and found["against"] == []
    assert {(rail["node"], rail["bytes"]) for rail in found["rails"]} == {(node, 8972) for node in cables.NODES}
    assert all(rail["rtt_ms"] is not None for rail in found["rails"])
    alike = found["nodes"][bed.HEAD]
    assert alike["kernel"] and alike["memory_kb"] == 127535084 and alike["gpu_driver"] == "580.126.09"


@pytest.mark.full
def test_a_second_run_changes_nothing(ours: None) -> None:
    """molecule's idempotence looks too; here the differences are shown."""
    run = cables.network("--diff")
    assert run.status == 0 and run.changed() == {} and run.differences() == []


def test_what_was_broken_by_hand_is_mended(ours: None) -> None:
    """An address that is gone, an MTU that is 1500, an address too many, and a flushed firewall."""
    node = bed.WORKER
    bed.on(node, "ip", "address", "del", "192.168.177.12/24", "dev", cables.PORT1[0])
    bed.on(node, "ip", "link", "set", "dev", cables.PORT1[1], "mtu", "1500")
    bed.on(node, "ip", "address", "add", "10.1.2.3/24", "dev", cables.PORT1[1])
    run = cables.network()
    assert run.status == 0, run.failures()
    assert run.changed() == {node: ["Address the rails"]}
    assert cables.right(node)


def test_a_cut_cable_is_one_sentence(ours: None) -> None:
    bed.twin("cut", "cable1")
    before = {node: cables.carried(node) for node in cables.NODES}
    said = cables.refusals(cables.network())
    assert len(said) == 1 and "2 cabled rails are needed and 1 of" in said[0] and f"({cables.PORT1[0]})" in said[0]
    assert {node: cables.carried(node) for node in cables.NODES} == before


@pytest.mark.full
def test_working_rails_are_adopted_measured_and_left_alone(others: None) -> None:
    """Fails when our file is written over somebody else's, or when nobody learns whose it is."""
    files = {node: bed.on(node, "sha256sum", cables.THEIRS) for node in cables.NODES}
    run = cables.network(cx7_network_min_gbps=1)
    assert run.status == 0, run.failures()
    for node in cables.NODES:
        assert bed.on(node, "sha256sum", cables.THEIRS) == files[node]
        assert bed.on(node, "sh", "-c", "ls /etc/netplan").split() == ["40-cx7.yaml"]
        assert cables.carried(node)[cables.PORT1[0]] == [f"192.168.100.{cables.HOST[node]}/24"]
        assert '"address": "192.168.100.' in bed.on(node, "cat", "/etc/glm-vllm/fabric.json")
    found = cables.record(bed.HEAD)
    assert found["adopted"] and found["files"][bed.HEAD] == [
        f"{cables.THEIRS} (of NVIDIA's playbook, sparkrun or eugr)"
    ]
    assert found["tool"] == "iperf3"
    # Both cables are this machine's processor: together they may be slower, and nothing else is worth a word.
    assert [said for said in found["warnings"] if "Gb/s together" not in said] == []
    speeds = [rail for rail in found["rails"] if rail["node"] == bed.WORKER]
    assert all(rail["gbps"] > 1 and rail["together_gbps"] > 0 for rail in speeds) and len(speeds) == 2


def test_a_foreign_file_that_does_not_work_is_shown(others: None) -> None:
    """The worker's second rail is in another subnet."""
    cables.foreign(bed.WORKER, cables.netplan(("192.168.100", "192.168.99"), (12, 12)))
    pair.wait_for(lambda: "192.168.99.12/24" in str(cables.carried(bed.WORKER)), 20, "their addresses")
    said = cables.refusals(cables.network())
    assert len(said) == 1, said
    assert said[0].startswith(
        f"spark-a: {cables.THEIRS} (of NVIDIA's playbook, sparkrun or eugr) configures enp1s0f1np1"
    )
    assert "does not work" in said[0] and "addresses: [192.168.100.11/24]" in said[0]


@pytest.mark.full
def test_adopted_addresses_that_nobody_answers_are_shown(others: None) -> None:
    """Right on paper: the same subnets, but the cables are crossed between the rails."""
    cables.foreign(bed.WORKER, cables.netplan(("192.168.101", "192.168.100"), (12, 12)))
    pair.wait_for(lambda: "192.168.101.12/24" in cables.carried(bed.WORKER).get(cables.PORT1[0], ()), 20, "them")
    said = cables.refusals(cables.network())
    assert len(said) == 1 and "does not work" in said[0] and "the peer does not answer" in said[0]


@pytest.mark.full
def test_a_foreign_file_beside_ours_is_shown(ours: None) -> None:
    cables.foreign(bed.HEAD, cables.netplan(("192.168.100", "192.168.101"), (11, 11)), apply=False)
    said = cables.refusals(cables.network())
    assert len(said) == 1 and "as our file does, and both are merged; remove it" in said[0]
    assert cables.right(bed.HEAD)


@pytest.mark.full
def test_equal_1500_and_one_subnet_are_warnings_and_unequal_mtu_a_stop(others: None) -> None:
    cables.take_over(sizes=(1500, 1500))
    assert cables.network().status == 0
    assert [w.split(", ")[0] for w in cables.record(bed.HEAD)["warnings"]] == [
        f"{node}: the rails have MTU 1500" for node in cables.NODES
    ]
    cables.take_over(sizes=(9000, 1500))
    said = cables.refusals(cables.network())
    assert len(said) == 1 and "MTU of the rails differs (spark-a: 9000, spark-b: 1500)" in said[0]


@pytest.mark.full
def test_addresses_without_a_file_are_adopted_with_a_warning(ours: None) -> None:
    for node in cables.NODES:
        bed.on(node, "sh", "-c", f"rm {cables.OURS}; netplan generate; networkctl reload")
        for port, net in zip(cables.PORT1, (177, 178), strict=True):
            bed.on(node, "ip", "address", "replace", f"192.168.{net}.{cables.HOST[node]}/24", "dev", port)
    assert cables.network().status == 0
    assert "no file keeps the addresses" in str(cables.record(bed.HEAD)["warnings"])
    for node in cables.NODES:
        for port in cables.PORT1:
            bed.on(node, "ip", "address", "flush", "dev", port)


@pytest.mark.full
@pytest.mark.parametrize("cable", ["cable0", "cable1"])
def test_each_cable_comes_back(ours: None, cable: str) -> None:
    bed.twin("cut", cable)
    assert cables.network().status != 0
    bed.twin("mend", cable)
    run = cables.network()
    assert run.status == 0 and run.changed() == {}


@pytest.mark.full
def test_a_cable_in_the_other_port_is_followed(ours: None) -> None:
    bed.twin("swap", bed.WORKER)
    run = cables.network()
    assert run.status == 0, run.failures()
    assert set(run.changed()) == {bed.WORKER} and cables.right(bed.WORKER, cables.PORT0)
    assert cables.network().changed() == {}


@pytest.mark.full
def test_the_rails_come_back_after_a_reboot(ours: None) -> None:
    for node in cables.NODES:
        bed.twin("kill", node)
    bed.twin("up")
    for node in cables.NODES:
        pair.wait_for(lambda node=node: cables.right(node), 30, "the rails of a node that booted")
        bed.on(node, "nft", "list", "table", "inet", "glm_vllm_fabric")


@pytest.mark.full
def test_measure_changes_nothing_and_status_shows_it(ours: None) -> None:
    before = cables.record(bed.HEAD)["when"]
    run = cables.network("--tags", "measure", "--diff")
    assert run.status == 0 and run.changed() == {}
    assert "Write the fabric firewall" not in run.output
    assert cables.record(bed.HEAD)["when"] > before


@pytest.mark.full
def test_the_trap_is_named_with_its_remedy(ours: None) -> None:
    """ib_write_bw of the bed is recorded output; here it is the recorded one of a wedged port."""
    recorded = "/usr/local/lib/twin/recorded/ib_write_bw.txt"
    healthy = bed.on(bed.WORKER, "cat", recorded)
    without = {node: bed.on(node, "cat", "/etc/glm-vllm/fabric.json") for node in cables.NODES}
    rdma = {"cx7_network_rdma": "auto", "cx7_network_min_gbps": 80}
    for node in cables.NODES:
        gid = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}"
        for net, hca in ((177, "rocep1s0f1"), (178, "roceP2p1s0f1")):
            text = gid.format(192, 168, net, cables.HOST[node])
            # What the kernel writes once the address is there
            pair.write(node, f"/run/twin-standins/class/infiniband/{hca}/ports/1/gids/3", text)
            pair.write(node, f"/run/twin-standins/class/infiniband/{hca}/ports/1/state", "4: ACTIVE")
    run = cables.network(**rdma)
    assert run.status == 0, run.failures()
    assert all(rail["gbps"] > 80 for rail in cables.record(bed.HEAD)["rails"] if rail["node"] == bed.WORKER)
    try:
        pair.write(bed.WORKER, recorded, healthy.replace("97.28", "13.23").replace("92.57", "13.23"))
        run = cables.network(**rdma)
    finally:
        pair.write(bed.WORKER, recorded, healthy)
        for node in cables.NODES:  # that the rails have RDMA stands in it, and the next test's nodes have none
            pair.write(node, "/etc/glm-vllm/fabric.json", without[node])
    said = cables.refusals(run)
    assert run.status and len(said) == 1 and "13.2 Gb/s, below the floor of 80; the port is wedged" in said[0]
    assert "reboot both Sparks" in said[0]
