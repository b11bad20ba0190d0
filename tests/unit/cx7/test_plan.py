# SPDX-License-Identifier: Apache-2.0
"""Who gets which address, what is adopted, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ansible.errors import AnsibleFilterError

RAILS = [{"subnet": "192.168.177.0/24"}, {"subnet": "192.168.178.0/24"}]


def port(netdev: str, number: int, domain: int, carrier: bool | None = True, addresses: tuple = (), mtu: int = 9000):
    return {
        "netdev": netdev,
        "port": number,
        "domain": domain,
        "carrier": carrier,
        "mtu": mtu,
        "addresses": list(addresses),
    }


def node(*ports: dict[str, Any], own: bool = False, management: str = "192.0.2.9") -> dict[str, Any]:
    return {"ports": list(ports), "others": {"eth0": [f"{management}/24"]}, "management": management, "own_file": own}


@pytest.fixture
def cx7(plugin):
    return plugin("filter/cx7.py")


@pytest.fixture
def pair():
    return {
        "a": node(port("enp1s0f1np1", 1, 0), port("enP2p1s0f1np1", 1, 2)),
        "b": node(port("enp1s0f0np0", 0, 0), port("enP2p1s0f0np0", 0, 2), management="192.0.2.10"),
    }


def carry(pair, first: str, second: str) -> None:
    for host, name in ((10, "a"), (11, "b")):
        for rail, net in zip(pair[name]["ports"], (first, second), strict=True):
            rail["addresses"] = [f"{net}.{host}/24"]


def test_ports_may_differ_per_node(cx7, pair):
    plan = cx7.cx7_plan(pair, RAILS, management={"a": "192.0.2.1", "b": "b.example"})
    assert plan["b"] == {
        "adopted": False,
        "management": "192.0.2.10",
        "peer": "a",
        "peer_management": "192.0.2.1",
        "rails": [
            {"netdev": "enp1s0f0np0", "address": "192.168.177.12", "prefix": 24, "subnet": "192.168.177.0/24",
             "peer": "192.168.177.11", "mtu": 9000},
            {"netdev": "enP2p1s0f0np0", "address": "192.168.178.12", "prefix": 24, "subnet": "192.168.178.0/24",
             "peer": "192.168.178.11", "mtu": 9000},
        ],
    }  # fmt: skip


def test_working_addresses_are_adopted_and_paired_by_subnet(cx7, pair):
    carry(pair, "192.168.100", "192.168.101")
    pair["b"]["ports"].reverse()
    plan = cx7.cx7_plan(pair, RAILS)
    assert plan["a"]["adopted"]
    assert [(r["address"], r["peer"]) for r in plan["a"]["rails"]] == [
        ("192.168.100.10", "192.168.100.11"),
        ("192.168.101.10", "192.168.101.11"),
    ]


@pytest.mark.parametrize("how", ["file", "mode"])
def test_our_own_addresses_are_not_adopted(cx7, pair, how):
    carry(pair, "192.168.100", "192.168.101")
    pair["a"]["own_file"] = how == "file"
    plan = cx7.cx7_plan(pair, RAILS, mode="own" if how == "mode" else "auto")
    assert not plan["a"]["adopted"]
    assert plan["a"]["rails"][0]["address"] == "192.168.177.11"


def test_check_mode_guesses_where_the_carrier_is_unknown(cx7, pair):
    for found in pair.values():
        for rail in found["ports"]:
            rail["carrier"] = None
    with pytest.raises(AnsibleFilterError, match="seat the QSFP cable"):
        cx7.cx7_plan(pair, RAILS)
    assert cx7.cx7_plan(pair, RAILS, guess=True)["a"]["rails"][0]["netdev"] == "enp1s0f1np1"


def broken(pair, how: str) -> list[dict[str, str]]:
    rails = copy.deepcopy(RAILS)
    if how == "no port":
        pair["a"]["ports"] = []
    elif how == "one rail":
        pair["b"]["ports"][1]["carrier"] = False
    elif how == "same subnet":
        carry(pair, "192.168.100", "192.168.100")
    elif how == "other subnets":
        carry(pair, "192.168.100", "192.168.101")
        pair["b"]["ports"][1]["addresses"] = ["192.168.102.11/24"]
    elif how == "unequal mtu":
        carry(pair, "192.168.100", "192.168.101")
        pair["b"]["ports"][0]["mtu"] = 1500
    elif how == "management":
        pair["a"]["others"]["eth0"] = ["192.168.177.5/24"]
    elif how == "missing node":
        pair["b"] = {}
    elif how == "host bits":
        rails[0]["subnet"] = "192.168.177.1/24"
    elif how == "overlap":
        rails[1]["subnet"] = "192.168.177.0/25"
    elif how == "small":
        rails[0]["subnet"] = "192.168.177.0/29"
    return rails


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("no port", "a: no ConnectX-7 port is on the PCI bus; plug the QSFP cable"),
        ("one rail", r"b: 2 cabled rails are needed and 1 of .* has a carrier \(enp1s0f0np0\)"),
        ("same subnet", "a: the rails already carry addresses .* not lie in the same 2 subnets"),
        ("other subnets", "b: the rails already carry addresses"),
        ("unequal mtu", r"MTU of the rails differs \(a: 9000, b: 1500\); set the same MTU"),
        ("management", "192.168.177.0/24 is also the network of eth0 .* on a; choose another subnet"),
        ("missing node", "b is missing from this run: run without --limit"),
        ("host bits", "cx7_network_rails: .*host bits set; write a network such as"),
        ("overlap", "192.168.177.0/25 overlaps 192.168.177.0/24"),
        ("small", "192.168.177.0/29 is too small for node 1"),
    ],
)
def test_what_is_refused(cx7, pair, how, sentence):
    with pytest.raises(AnsibleFilterError, match=sentence):
        cx7.cx7_plan(pair, broken(pair, how), mode="auto")


def test_fabric_json_names_no_interface(cx7, pair):
    fabric = cx7.cx7_fabric(cx7.cx7_plan(pair, RAILS)["a"], "auto")
    assert fabric["rails"][0] == {"address": "192.168.177.11", "prefix": 24, "peer": "192.168.177.12", "mtu": 9000}
    assert (fabric["schema"], fabric["rdma"], fabric["peer"]) == (1, "auto", "b")
    assert "np1" not in str(fabric)


def test_the_hosts_file_loses_the_trap_and_keeps_the_rest(cx7, fixtures, pair):
    plan = {f"spark-{name}": part | {"peer": ""} for name, part in cx7.cx7_plan(pair, RAILS).items()}
    before = (fixtures / "hosts/bad_127_0_1_1.txt").read_text()
    after = cx7.cx7_hosts(before, plan, "spark-a", "spark-a")
    assert "127.0.1.1" not in after
    assert after.startswith("127.0.0.1 localhost\n192.168.100.11 spark-b\n")
    assert "192.168.177.11 spark-a.fabric spark-a\n192.168.178.11 spark-a.fabric1\n" in after
    assert cx7.cx7_hosts(after, plan, "spark-a", "spark-a") == after


def test_a_hosts_file_without_the_trap_keeps_its_names(cx7, fixtures, pair):
    plan = cx7.cx7_plan(pair, RAILS)
    before = (fixtures / "hosts/good.txt").read_text()
    assert cx7.cx7_hosts(before, plan, "spark-a", "a").startswith(before)
