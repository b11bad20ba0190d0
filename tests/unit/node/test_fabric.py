"""`glm-vllm fabric` over recorded nodes: what it resolves, what it writes, how it names what is missing."""

import json
from pathlib import Path

import pytest
import yaml
from glm_vllm_overlay.node import fabric

REPOSITORY = Path(__file__).parents[3]
FIXTURES = REPOSITORY / "tests/fixtures"
NODE_A = [("192.168.100.10", "192.168.100.11"), ("192.168.101.10", "192.168.101.11")]
NODE_B = [(peer, own) for own, peer in NODE_A]


def spark(node, ip: str, sysfs: str | None, rails=NODE_A, rdma="auto") -> Path | None:
    """Make `node` a recorded Spark."""
    node.fabric(rdma, rails)
    node.addresses((FIXTURES / f"ip_j_addr/{ip}.json").read_text())
    return node.sysfs(sysfs) if sysfs else None


def fabric_env(node) -> dict[str, str]:
    lines = (node.root / "run/glm-vllm/fabric.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def test_healthy_pair_writes_the_measured_set(node, glm_vllm):
    spark(node, "healthy", "sysfs_healthy")
    code, out, _ = glm_vllm("fabric", "--json")
    assert code == 0
    assert (
        fabric_env(node)
        == json.loads(out)["environment"]
        == {
            "VLLM_HOST_IP": "192.168.100.10",
            "NCCL_SOCKET_IFNAME": "enp1s0f0np0",
            "GLOO_SOCKET_IFNAME": "enp1s0f0np0",
            "TP_SOCKET_IFNAME": "enp1s0f0np0",
            "NCCL_NET": "IB",
            "NCCL_NET_PLUGIN": "none",
            "NCCL_IB_DISABLE": "0",
            "NCCL_IB_MERGE_NICS": "0",
            "NCCL_CROSS_NIC": "0",
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_CUMEM_ENABLE": "0",
            "NCCL_IGNORE_CPU_AFFINITY": "1",
            "NCCL_DEBUG": "WARN",
            "NCCL_IB_HCA": "rocep1s0f0,roceP2p1s0f0",
            "NCCL_IB_ROCE_VERSION_NUM": "2",
            "NCCL_IB_GID_INDEX": "3",
        }
    )
    assert [rail["why"] for rail in json.loads(out)["rails"]] == [
        "enp1s0f0np0 has 192.168.100.10; rocep1s0f0 GID 3 is RoCE v2 and carries it",
        "enP2p1s0f0np0 has 192.168.101.10; roceP2p1s0f0 GID 3 is RoCE v2 and carries it",
    ]


def test_shifted_gids_are_followed(node, glm_vllm):
    spark(node, "healthy_node_b", "sysfs_gid_shift5", NODE_B)
    assert glm_vllm("fabric")[0] == 0
    assert fabric_env(node)["NCCL_IB_GID_INDEX"] == "5"


def move_gid(device: Path, old: int, new: int) -> None:
    """Put the entry `old` of a device's port where `new` is, and nothing where it was."""
    port = device / "ports/1"
    for folder in ("gid_attrs/types", "gid_attrs/ndevs", "gids"):
        (port / folder / str(new)).write_text((port / folder / str(old)).read_text())
    (port / f"gids/{old}").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")


def test_different_indices_leave_the_search_to_nccl(node, glm_vllm):
    devices = spark(node, "healthy", "sysfs_healthy")
    move_gid(devices / "roceP2p1s0f0", 3, 7)
    code, out, _ = glm_vllm("fabric", "--json")
    assert code == 0
    assert [rail["gid_index"] for rail in json.loads(out)["rails"]] == [3, 7]
    written = fabric_env(node)
    assert "NCCL_IB_GID_INDEX" not in written
    assert (written["NCCL_IB_ADDR_FAMILY"], written["NCCL_IB_ROCE_VERSION_NUM"]) == ("AF_INET", "2")


@pytest.mark.parametrize("second", [3, 7])
def test_ray_leaves_every_variable_of_a_node_on_the_node(node, glm_vllm, second):
    """vLLM would carry what the head has to the worker, where the index may be another one."""
    devices = spark(node, "healthy", "sysfs_healthy")
    if second != 3:
        move_gid(devices / "roceP2p1s0f0", 3, second)
    assert glm_vllm("fabric")[0] == 0
    kept = yaml.safe_load((REPOSITORY / "roles/ray-cluster/vars/main.yml").read_text())["__ray_cluster_own_variables"]
    equal_everywhere = {*fabric.NCCL, "NCCL_IB_ROCE_VERSION_NUM"}
    assert set(fabric_env(node)) - equal_everywhere <= set(kept)


def test_index_ten_comes_after_index_nine(node, glm_vllm):
    devices = spark(node, "healthy", "sysfs_healthy")
    for name in ("rocep1s0f0", "roceP2p1s0f0"):
        move_gid(devices / name, 3, 10)
    assert glm_vllm("fabric")[0] == 0
    assert fabric_env(node)["NCCL_IB_GID_INDEX"] == "10"


def test_another_address_or_roce_v1_is_never_taken(node, glm_vllm):
    devices = spark(node, "healthy", "sysfs_healthy")
    port = devices / "rocep1s0f0/ports/1"
    (port / "gids/3").write_text("0000:0000:0000:0000:0000:ffff:c0a8:640b\n")  # the peer's
    code, _, _ = glm_vllm("fabric")
    assert code == 1
    (port / "gids/3").write_text("0000:0000:0000:0000:0000:ffff:c0a8:640a\n")
    (port / "gid_attrs/types/3").write_text("IB/RoCE v1\n")
    assert glm_vllm("fabric")[0] == 1


def derived(name: str, **changes) -> str:
    """A recorded `ip -j addr` with the entry of one interface changed."""
    entries = json.loads((FIXTURES / f"ip_j_addr/{name}.json").read_text())
    for entry in entries:
        if entry["ifname"] == changes["ifname"]:
            entry |= changes
    return json.dumps(entries)


def test_missing_gid_names_rail_and_device(node, glm_vllm):
    spark(node, "healthy", "sysfs_gid3_empty")
    code, out, _ = glm_vllm("fabric", "--json")
    assert code == 1
    assert json.loads(out)["message"].startswith(
        "rail 0 (192.168.100.10 on enp1s0f0np0): rocep1s0f0 has no RoCE v2 GID for it"
    )
    assert not (node.root / "run/glm-vllm/fabric.env").exists()


def test_lost_addresses(node, glm_vllm):
    spark(node, "lost_after_reboot", "sysfs_healthy")
    code, out, _ = glm_vllm("fabric")
    assert code == 1
    assert "rail 0 (192.168.100.10): no interface has this address; check the cable to spark-b" in out


def test_no_carrier_names_the_second_rail_and_the_cable(node, glm_vllm):
    spark(node, "healthy", "sysfs_healthy")
    node.addresses(derived("healthy", ifname="enP2p1s0f0np0", flags=["NO-CARRIER", "BROADCAST", "MULTICAST", "UP"]))
    code, out, _ = glm_vllm("fabric", "--json")
    assert code == 1
    assert json.loads(out)["message"] == (
        "rail 1 (192.168.101.10 on enP2p1s0f0np0): no carrier; check the cable to spark-b and that spark-b is on"
    )


def test_one_address_on_two_interfaces(node, glm_vllm):
    spark(node, "healthy", "sysfs_healthy")
    info = [{"family": "inet", "local": "192.168.100.10", "prefixlen": 24}]
    node.addresses(derived("healthy", ifname="enp1s0f1np1", addr_info=info))
    code, out, _ = glm_vllm("fabric")
    assert code == 1
    assert "enp1s0f0np0 and enp1s0f1np1 both have this address" in out


def test_no_rdma_device(node, glm_vllm):
    spark(node, "healthy", None)
    code, out, _ = glm_vllm("fabric")
    assert code == 1
    assert "set cx7_network_rdma: none" in out


def test_rails_in_one_subnet_are_told_apart(node, glm_vllm):
    spark(
        node, "same_subnet", None, [("192.168.100.10", "192.168.100.20"), ("192.168.100.11", "192.168.100.21")], "none"
    )
    code, out, _ = glm_vllm("fabric", "--json")
    assert code == 0
    assert [rail["netdev"] for rail in json.loads(out)["rails"]] == ["enp1s0f0np0", "enP2p1s0f0np0"]


def test_unequal_mtu_is_shown(node, glm_vllm):
    spark(node, "mtu_one_side_1500", None, rdma="none")
    assert [rail["mtu"] for rail in json.loads(glm_vllm("fabric", "--json")[1])["rails"]] == [1500, 9000]


def test_without_rdma_no_nccl_device_is_set(node, glm_vllm):
    spark(node, "healthy", "sysfs_healthy", rdma="none")
    assert glm_vllm("fabric")[0] == 0
    assert set(fabric_env(node)) == {"VLLM_HOST_IP", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}


@pytest.mark.parametrize("rdma", ["auto", "none"])
def test_no_value_is_empty(node, glm_vllm, rdma):
    spark(node, "healthy", "sysfs_healthy", rdma=rdma)
    assert glm_vllm("fabric")[0] == 0
    assert all(fabric_env(node).values())


def test_a_problem_leaves_the_old_file_alone(node, glm_vllm):
    spark(node, "healthy", "sysfs_healthy")
    glm_vllm("fabric")
    before = (node.root / "run/glm-vllm/fabric.env").read_bytes()
    node.addresses((FIXTURES / "ip_j_addr/lost_after_reboot.json").read_text())
    assert glm_vllm("fabric")[0] == 1
    assert (node.root / "run/glm-vllm/fabric.env").read_bytes() == before


def test_check_writes_nothing(node, glm_vllm):
    spark(node, "healthy", "sysfs_healthy")
    code, out, _ = glm_vllm("fabric", "--check", "--json")
    assert code == 0
    assert json.loads(out)["environment"]["NCCL_IB_GID_INDEX"] == "3"
    assert list((node.root / "run/glm-vllm").iterdir()) == []


def test_an_unwritable_folder_is_a_sentence(node, glm_vllm):
    (node.root / "run/glm-vllm").rmdir()
    code, _, err = glm_vllm("fabric")
    assert code == 1
    assert "fabric.env cannot be written" in err


@pytest.mark.parametrize("text", ["", "not json", "[{}]"])
def test_ip_that_says_nothing_useful(node, glm_vllm, text):
    node.addresses(text)
    code, out, err = glm_vllm("fabric")
    assert code in (1, 2)
    assert "`ip -j addr` gave no answer" in err or "no interface has this address" in out
