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


def node(*ports: dict[str, Any], management: str = "192.0.2.9") -> dict[str, Any]:
    return {"ports": list(ports), "others": {"eth0": [f"{management}/24"]}, "management": management}


def owned(*names: str, ours: bool = False, path: str = "", netdevs: tuple = ()) -> dict[str, dict[str, Any]]:
    files = {netdev: [path] for netdev in netdevs}
    return {name: {"netplan": True, "ours": ours, "files": files, "texts": {path: "network: {}"}} for name in names}


@pytest.fixture
def cx7(plugin):
    return plugin("filter/cx7.py")


@pytest.fixture
def pair():
    return {
        "a": node(port("enp1s0f1np1", 1, 0), port("enP2p1s0f1np1", 1, 2)),
        "b": node(port("enp1s0f0np0", 0, 0), port("enP2p1s0f0np0", 0, 2), management="192.0.2.10"),
    }


NOBODY = owned("a", "b")


def carry(pair, first: str, second: str) -> None:
    for host, name in ((10, "a"), (20, "b")):
        for number, (rail, net) in enumerate(zip(pair[name]["ports"], (first, second), strict=True)):
            rail["addresses"] = [f"{net}.{host + number}/24"]


def test_ports_may_differ_per_node(cx7, pair):
    plan = cx7.cx7_plan(pair, NOBODY, RAILS, management={"a": "192.0.2.1", "b": "b.example"})
    rail = {"netdev": "enp1s0f0np0", "address": "192.168.177.12", "prefix": 24, "subnet": "192.168.177.0/24",
            "peer": "192.168.177.11", "peers": {"a": "192.168.177.11"}, "theirs": {"a": 0}, "mtu": 9000,
            "set_mtu": True}  # fmt: skip
    assert plan["b"] == {
        "adopted": False,
        "files": [],
        "warnings": [],
        "management": "192.0.2.10",
        "peer": "a",
        "peer_management": "192.0.2.1",
        "names": [
            "192.168.177.12 b.fabric",
            "192.168.177.11 a.fabric",
            "192.168.178.12 b.fabric1",
            "192.168.178.11 a.fabric1",
        ],
        "trusted": ["192.168.177.11", "192.168.178.11", "192.0.2.1"],
        "rails": [
            rail,
            rail
            | {"netdev": "enP2p1s0f0np0", "address": "192.168.178.12", "subnet": "192.168.178.0/24",
               "peer": "192.168.178.11", "peers": {"a": "192.168.178.11"}, "theirs": {"a": 1}},
        ],
    }  # fmt: skip


def test_addresses_are_a_candidate_paired_by_subnet(cx7, pair):
    carry(pair, "192.168.100", "192.168.101")
    pair["b"]["ports"].reverse()
    path = "/etc/netplan/99-nvidia-sync-cluster.yaml"
    plan = cx7.cx7_candidate(pair, owned("a", "b", path=path, netdevs=("enp1s0f1np1", "enp1s0f0np0")), RAILS)
    assert plan["a"]["adopted"] and plan["a"]["warnings"] == []
    assert plan["a"]["files"] == [f"{path} (NVIDIA Sync's)"]
    assert [(r["address"], r["peer"]) for r in plan["a"]["rails"]] == [
        ("192.168.100.10", "192.168.100.20"),
        ("192.168.101.11", "192.168.101.21"),
    ]


def test_a_candidate_is_kept_only_when_its_trial_found_nothing(cx7, pair):
    carry(pair, "192.168.100", "192.168.101")
    candidate = cx7.cx7_candidate(pair, NOBODY, RAILS)
    assert cx7.cx7_plan(pair, NOBODY, RAILS, candidate=candidate) == candidate
    plan = cx7.cx7_plan(pair, NOBODY, RAILS, candidate=candidate, against=["a: silent."])
    assert not plan["a"]["adopted"] and plan["a"]["rails"][0]["address"] == "192.168.177.11"


@pytest.mark.parametrize(
    ("path", "writer"),
    [
        ("/etc/netplan/40-cx7.yaml", " (of NVIDIA's playbook, sparkrun or eugr)"),
        ("/etc/netplan/90-NM-0a1b.yaml", " (nmcli's)"),
        ("/etc/NetworkManager/system-connections/rail.nmconnection", " (nmcli's)"),
        ("/etc/netplan/60-glm-vllm-cx7.yaml", " (ours)"),
        ("/etc/netplan/50-mine.yaml", ""),
    ],
)
def test_whose_file_it_is(cx7, path, writer):
    assert cx7.whose(path) == path + writer


@pytest.mark.parametrize(
    ("nets", "mtu", "path", "said"),
    [
        (("192.168.100", "192.168.101"), 9000, "/etc/netplan/40-cx7.yaml", []),
        (("192.168.100", "192.168.100"), 9000, "/etc/netplan/40-cx7.yaml", ["lie in 192.168.100.0/24, so one route"]),
        (("192.168.100", "192.168.101"), 1500, "/etc/netplan/40-cx7.yaml", ["MTU 1500, which costs about 3 %"]),
        (("192.168.100", "192.168.101"), 9000, "", ["no file keeps the addresses"]),
    ],
)
def test_what_adopting_costs(cx7, pair, nets, mtu, path, said):
    carry(pair, *nets)
    for found in pair.values():
        for rail in found["ports"]:
            rail["mtu"] = mtu
    keeps = ("enp1s0f1np1", "enp1s0f0np0") if path else ()
    warnings = cx7.cx7_candidate(pair, owned("a", "b", path=path, netdevs=keeps), RAILS)["a"]["warnings"]
    assert len(warnings) == len(said)
    assert all(words in warning for words, warning in zip(said, warnings, strict=True))


def test_one_subnet_is_paired_in_order(cx7, pair):
    carry(pair, "192.168.100", "192.168.100")
    rails = cx7.cx7_candidate(pair, NOBODY, RAILS)["a"]["rails"]
    assert [(r["address"], r["peer"]) for r in rails] == [
        ("192.168.100.10", "192.168.100.20"),
        ("192.168.100.11", "192.168.100.21"),
    ]


@pytest.mark.parametrize("how", ["file", "mode"])
def test_our_own_addresses_are_not_adopted(cx7, pair, how):
    carry(pair, "192.168.100", "192.168.101")
    ours = owned("a", "b", ours=how == "file")
    assert cx7.cx7_candidate(pair, ours, RAILS, mode="own" if how == "mode" else "auto") == {}


@pytest.mark.parametrize(
    ("first", "second"), [("192.168.100.1/24", None), ("192.168.100.1/24", "10.0.0.1/24"), (None, None)]
)
def test_half_an_address_plan_is_no_candidate(cx7, pair, first, second):
    carry(pair, "192.168.100", "192.168.101")
    for rail, address in zip(pair["b"]["ports"], (first, second), strict=True):
        rail["addresses"] = [address] if address else []
    assert cx7.cx7_candidate(pair, NOBODY, RAILS) == {}


def test_of_two_cables_the_one_with_addresses_is_taken(cx7, pair):
    carry(pair, "192.168.100", "192.168.101")
    pair["a"]["ports"] = [port("enp1s0f0np0", 0, 0), port("enP2p1s0f0np0", 0, 2), *pair["a"]["ports"]]
    assert [r["netdev"] for r in cx7.cx7_candidate(pair, NOBODY, RAILS)["a"]["rails"]] == [
        "enp1s0f1np1",
        "enP2p1s0f1np1",
    ]


def test_check_mode_guesses_where_the_carrier_is_unknown(cx7, pair):
    for found in pair.values():
        for rail in found["ports"]:
            rail["carrier"] = None
    with pytest.raises(AnsibleFilterError, match="seat the QSFP cable"):
        cx7.cx7_plan(pair, NOBODY, RAILS)
    assert cx7.cx7_plan(pair, NOBODY, RAILS, guess=True)["a"]["rails"][0]["netdev"] == "enp1s0f1np1"


def broken(pair, how: str) -> list[dict[str, str]]:
    rails = copy.deepcopy(RAILS)
    if how == "no port":
        pair["a"]["ports"] = []
    elif how == "one rail":
        pair["b"]["ports"][1]["carrier"] = False
    elif how == "management":
        pair["a"]["others"]["eth0"] = ["192.168.177.5/24"]
    elif how == "only way":
        pair["a"]["ports"][0]["addresses"] = ["192.0.2.77/24"]
    elif how == "missing node":
        pair["b"] = {}
    elif how == "host bits":
        rails[0]["subnet"] = "192.168.177.1/24"
    elif how == "overlap":
        rails[1]["subnet"] = "192.168.177.0/25"
    elif how == "small":
        rails[0]["subnet"] = "192.168.177.0/29"
    elif how == "none":
        rails = []
    return rails


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("no port", "a: no ConnectX-7 port is on the PCI bus; plug the QSFP cable"),
        ("one rail", r"b: 2 cabled rails are needed and 1 of .* has a carrier \(enp1s0f0np0\)"),
        ("management", "192.168.177.0/24 is also the network of eth0 .* on a; choose .*cx7_network_allow_management"),
        ("only way", "a: 192.0.2.77, by which this run reaches it, is on the rail enp1s0f1np1; name another"),
        ("missing node", "b is missing from this run: run without --limit"),
        ("host bits", "cx7_network_rails: .*host bits set; write a network such as"),
        ("overlap", "192.168.177.0/25 overlaps 192.168.177.0/24"),
        ("small", "192.168.177.0/29 is too small for node 1"),
        ("none", "cx7_network_rails is empty"),
    ],
)
def test_what_is_refused(cx7, pair, how, sentence):
    rails = broken(pair, how)
    with pytest.raises(AnsibleFilterError, match=sentence):
        cx7.cx7_plan(pair, NOBODY, rails, management={"a": "192.0.2.77"})


@pytest.mark.parametrize("how", ["management", "only way"])
def test_consent_lets_management_be_touched(cx7, pair, how):
    rails = broken(pair, how)
    assert cx7.cx7_plan(pair, NOBODY, rails, allow_management=True, management={"a": "192.0.2.77"})


def test_unequal_mtu_stops(cx7, pair):
    carry(pair, "192.168.100", "192.168.101")
    pair["b"]["ports"][0]["mtu"] = 1500
    with pytest.raises(
        AnsibleFilterError, match=r"MTU of the rails differs \(a: 9000, b: 1500 and 9000\); set the same"
    ):
        cx7.cx7_candidate(pair, NOBODY, RAILS)


@pytest.mark.parametrize(
    ("ours", "sentence"),
    [
        (
            False,
            r"a: /etc/netplan/40-cx7.yaml \(of NV.*configures enp1s0f1np1 and does not work \(a: silent.\); mend it",
        ),
        (
            True,
            r"a: /etc/netplan/40-cx7.yaml .*configures enp1s0f1np1, as our file does, and both are merged; remove it",
        ),
    ],
)
def test_a_foreign_file_that_does_not_work_is_shown(cx7, pair, ours, sentence):
    owners = owned("a", "b", ours=ours, path="/etc/netplan/40-cx7.yaml", netdevs=("enp1s0f1np1",))
    with pytest.raises(AnsibleFilterError, match=sentence + "(?s:.*)It says:\nnetwork: {}"):
        cx7.cx7_plan(pair, owners, RAILS, mode="auto", against=["a: silent."])


def test_mode_adopt_never_writes(cx7, pair):
    with pytest.raises(AnsibleFilterError, match="cx7_network_mode is adopt and there is nothing to adopt"):
        cx7.cx7_plan(pair, NOBODY, RAILS, mode="adopt")


def test_behind_a_switch_the_mtu_is_left_alone(cx7, pair):
    for found in pair.values():
        for rail in found["ports"]:
            rail["mtu"] = 4200
    rail = cx7.cx7_plan(pair, NOBODY, RAILS, switch=True)["a"]["rails"][0]
    assert (rail["mtu"], rail["set_mtu"]) == (4200, False)
    rail = cx7.cx7_plan(pair, NOBODY, RAILS, switch=True, mtu=9000)["a"]["rails"][0]
    assert (rail["mtu"], rail["set_mtu"]) == (9000, True)


def nodes(number: int, *, both: bool):
    found = {}
    for name in "abcd"[:number]:
        ports = [port("enp1s0f1np1", 1, 0), port("enP2p1s0f1np1", 1, 2)]
        if both:
            ports = [port("enp1s0f0np0", 0, 0), port("enP2p1s0f0np0", 0, 2), *ports]
        found[name] = node(*ports)
    return found


def subnets(number: int) -> list[dict[str, str]]:
    return [{"subnet": f"192.168.{170 + i}.0/24"} for i in range(number)]


@pytest.mark.parametrize("number", [3, 4])
def test_a_switch_joins_all_in_two_subnets(cx7, number):
    found = nodes(number, both=False)
    plan = cx7.cx7_plan(found, owned(*found), RAILS, switch=True)
    assert [r["address"] for r in plan["c"]["rails"]] == ["192.168.177.13", "192.168.178.13"]
    assert list(plan["c"]["rails"][0]["peers"]) == [n for n in found if n != "c"]
    assert len(plan["a"]["trusted"]) == 2 * (number - 1) + 1  # the management address is one and the same here
    assert len({address.split()[1] for address in plan["a"]["names"]}) == 2 * number


@pytest.mark.parametrize("number", [3, 4])
def test_a_ring_has_two_subnets_a_cable(cx7, number):
    found = nodes(number, both=True)
    plan = cx7.cx7_plan(found, owned(*found), subnets(2 * number))
    seen: dict[str, list[tuple[str, str]]] = {}
    for name, part in plan.items():
        assert len(part["rails"]) == 4 and len({r["subnet"] for r in part["rails"]}) == 4
        for rail in part["rails"]:
            seen.setdefault(rail["subnet"], []).append((name, rail["netdev"]))
            assert len(rail["peers"]) == 1
            for peer, index in rail["theirs"].items():
                assert plan[peer]["rails"][index]["subnet"] == rail["subnet"]
    assert len(seen) == 2 * number and all(len(ends) == 2 for ends in seen.values())
    assert seen["192.168.170.0/24"] == [("a", "enp1s0f1np1"), ("b", "enp1s0f0np0")]
    last = "abcd"[number - 1]
    assert sorted(seen[f"192.168.{170 + 2 * number - 1}.0/24"]) == [("a", "enP2p1s0f0np0"), (last, "enP2p1s0f1np1")]


def test_a_ring_asks_for_its_subnets_and_both_cables(cx7):
    found = nodes(3, both=True)
    with pytest.raises(AnsibleFilterError, match="a ring of 3 nodes has 3 cables of two rails each, and 2 subnets are"):
        cx7.cx7_plan(found, owned(*found), RAILS)
    found["b"]["ports"] = [port(f"x{i}", 1, i) for i in range(4)]
    with pytest.raises(AnsibleFilterError, match="b: a ring has a cable from port 1 .* 0 of 2 rails of port 0 have a"):
        cx7.cx7_plan(found, owned(*found), subnets(6))


def test_wanted(cx7):
    assert cx7.cx7_wanted(RAILS, 2) == cx7.cx7_wanted(RAILS, 3, switch=True) == 2
    assert cx7.cx7_wanted(subnets(6), 3) == 4


def test_networkd_files_where_netplan_is_absent(cx7, pair):
    files = cx7.cx7_networkd(cx7.cx7_plan(pair, NOBODY, RAILS)["a"]["rails"])
    assert [f["path"] for f in files] == [
        "/etc/systemd/network/60-glm-vllm-enp1s0f1np1.network",
        "/etc/systemd/network/60-glm-vllm-enP2p1s0f1np1.network",
    ]
    assert "Name=enp1s0f1np1\n" in files[0]["content"] and "Address=192.168.177.11/24\n" in files[0]["content"]
    assert "MTUBytes=9000" in files[0]["content"]


def test_ipv6_of_the_peer(cx7):
    found = cx7.cx7_trusted6(
        [["fe80::1", "2001:db8::5", "::1"], ["2001:db8::5"]], ["2001:db8::9", "192.0.2.1", "b.example"]
    )
    assert found == ["2001:db8::5", "2001:db8::9"]


def test_fabric_json_names_no_interface(cx7, pair):
    fabric = cx7.cx7_fabric(cx7.cx7_plan(pair, NOBODY, RAILS)["a"], "auto")
    assert fabric["rails"][0] == {"address": "192.168.177.11", "prefix": 24, "peer": "192.168.177.12", "mtu": 9000}
    assert (fabric["schema"], fabric["rdma"], fabric["peer"]) == (1, "auto", "b")
    assert "np1" not in str(fabric)


ALIKE = {"gpu_driver": "580.1", "firmware": "28.45", "kernel": "6.17", "memory_kb": 127535084, "sm_clock_mhz": 3003}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("gpu_driver", "580.2", "GPU driver (a: 580.1, b: 580.2); update both"),
        ("firmware", None, "ConnectX-7 firmware (a: 28.45, b: none)"),
        ("kernel", "7.0", "kernel (a: 6.17, b: 7.0)"),
        ("memory_kb", 63767542, "memory in GiB (a: 122, b: 61)"),
        ("sm_clock_mhz", 2200, "SM clock in MHz (a: 3003, b: 2200); set the same limit"),
        ("memory_kb", 127535000, ""),
    ],
)
def test_parity(cx7, key, value, words):
    said = cx7.cx7_differences({"a": ALIKE, "b": ALIKE | {key: value}})
    assert (len(said) == 1 and words in said[0]) if words else not said


def test_a_measurement_names_what_was_measured_and_what_is_wrong(cx7, pair):
    plan = cx7.cx7_plan(pair, NOBODY, RAILS)
    ping = {"netdev": "enp1s0f1np1", "peer": "192.168.177.12", "bytes": 8972, "rtt_ms": 0.1}
    speed = {"netdev": "enp1s0f1np1", "peer": "192.168.177.12", "gbps": 97.3, "together_gbps": 94.9}
    document = cx7.cx7_measurement(
        plan,
        {"a": {"rails": [ping], "against": ["silent."]}, "b": {"rails": [], "against": []}},
        {"a": {"rails": [speed], "against": [], "warnings_found": ["slow together."]}, "b": {"skipped": True}},
        {"a": ALIKE, "b": ALIKE | {"kernel": "7.0"}},
        "ib_write_bw",
        80,
        "2026-01-02T03:04:05Z",
    )
    assert document["rails"] == [{"node": "a", **ping, "gbps": 97.3, "together_gbps": 94.9}]
    assert document["against"] == ["a: silent."]
    assert document["warnings"] == [
        "a: slow together.",
        "The nodes differ in kernel (a: 6.17, b: 7.0); update and reboot both.",
    ]
    assert (document["when"], document["adopted"], document["floor_gbps"]) == ("2026-01-02T03:04:05Z", False, 80)
