"""`glm-vllm fabric --bundle`: what it chooses from a recorded node, and what it never chooses."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from bundles import Bundle, healthy
from glm_vllm_overlay import cli
from variants import (
    HCAS,
    TWINS,
    bond,
    foreign_card,
    gid,
    link,
    mapped,
    mlx5,
    nameless_card,
    port_one,
    states,
    steps,
    v4,
    v6_only,
    vlan,
)


@pytest.fixture
def fabric(capsys):
    """`code, document = fabric(folder)`."""

    def run(folder: Path) -> tuple[int, dict]:
        code = cli.main(["fabric", "--bundle", str(folder), "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_healthy_node(bundle, fabric):
    code, document = fabric(bundle.folder)
    assert code == 0
    assert document["environment"]["NCCL_IB_HCA"] == ",".join(HCAS)
    assert document["environment"]["NCCL_IB_GID_INDEX"] == "3"
    assert document["environment"]["NCCL_NET"] == "IB"
    assert document["environment"]["VLLM_HOST_IP"] == "192.168.100.10"
    assert document["rails"][0]["why"] == "enp1s0f0np0 has 192.168.100.10; rocep1s0f0 GID 3 is RoCE v2 and carries it"


def test_nothing_is_written(bundle, fabric, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM_ROOT", str(tmp_path / "root"))
    before = sorted(path.name for path in bundle.folder.rglob("*"))
    assert fabric(bundle.folder)[0] == 0
    assert sorted(path.name for path in bundle.folder.rglob("*")) == before
    assert not (tmp_path / "root").exists()


def test_the_shifted_node(tmp_path, fabric):
    assert fabric(healthy(tmp_path / "b", other=True).folder)[1]["environment"]["NCCL_IB_GID_INDEX"] == "5"


def test_different_indices_leave_the_search_to_nccl(bundle, fabric):
    gid(HCAS[1], 7, mapped("192.168.101.10"))(bundle)
    gid(HCAS[1], 3, "fe80:0:0:0:0:0:0:9")(bundle)
    environment = fabric(bundle.folder)[1]["environment"]
    assert "NCCL_IB_GID_INDEX" not in environment
    assert (environment["NCCL_IB_ADDR_FAMILY"], environment["NCCL_IB_ROCE_VERSION_NUM"]) == ("AF_INET", "2")


@pytest.mark.parametrize(
    ("change", "hca", "interface"),
    [
        (port_one, "rocep1s0f1,roceP2p1s0f1", "enp1s0f1np1"),
        (mlx5, "mlx5_0,mlx5_2", "enp1s0f0np0"),
        (vlan, "rocep1s0f0,roceP2p1s0f0", "enp1s0f0np0.100"),
        (foreign_card, "rocep1s0f0,roceP2p1s0f0", "enp1s0f0np0"),
        (bond, "rocep1s0f0", "bond0"),
        (link(TWINS[1]), "rocep1s0f0", "enp1s0f0np0"),
        (nameless_card, "rocep1s0f0,roceP2p1s0f0", "enp1s0f0np0"),
    ],
)
def test_shapes_of_a_node(bundle, fabric, change, hca, interface):
    change(bundle)
    code, document = fabric(bundle.folder)
    assert code == 0, document
    assert document["environment"]["NCCL_IB_HCA"] == hca
    assert document["environment"]["NCCL_SOCKET_IFNAME"] == interface


def test_of_several_addresses_on_a_port_one_with_a_gid_is_taken(bundle, fabric):
    """NCCL takes each device once, and one index serves both although an address more sits at another."""
    gid(HCAS[0], 9, mapped("10.9.9.9"))(bundle)
    bundle.ip(lambda e: e[TWINS[0]].update(addr_info=[v4("169.254.3.4"), *e[TWINS[0]]["addr_info"], v4("10.9.9.9")]))
    environment = fabric(bundle.folder)[1]["environment"]
    assert environment["NCCL_IB_HCA"] == ",".join(HCAS)
    assert environment["VLLM_HOST_IP"] == "192.168.100.10"
    assert environment["NCCL_IB_GID_INDEX"] == "3"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: b.sysfs("sysfs_gid3_empty").drop("show_gids.txt"), "rocep1s0f0 has no RoCE v2 GID for it"),
        (
            lambda b: b.take("ip-addr.json", "ip_j_addr/lost_after_reboot.json"),
            "no ConnectX-7 port of this node has an",
        ),
        (v6_only, "no ConnectX-7 port of this node has an IPv4 address"),
        (steps(link(*TWINS)), "no carrier; check the cable"),
        (states("1: DOWN\n", HCAS[1]), "the port of roceP2p1s0f0 is not active"),
        (lambda b: b.ip(lambda e: e["enP7s7"].update(addr_info=[v4("192.168.100.10")])), "both have this address"),
    ],
)
def test_what_is_refused(bundle, fabric, change, sentence):
    change(bundle)
    code, document = fabric(bundle.folder)
    assert code == 1
    assert sentence in document["message"]
    assert not document.get("environment")


@pytest.mark.parametrize("text", [None, "[{", "{}", ""])
def test_without_addresses_nothing_is_chosen(bundle, fabric, text):
    bundle.drop("ip-addr.json") if text is None else bundle.put("ip-addr.json", text)
    code, document = fabric(bundle.folder)
    assert code == 2
    assert "without this node's own addresses no GID can be chosen" in document["message"]


def test_no_value_is_ever_empty(every_variant, fabric):
    for title, (folder, _) in every_variant.items():
        code, document = fabric(folder)
        assert all(document.get("environment", {"": "x"}).values()), title
        assert bool(document.get("environment")) == (code == 0), title


# ---- the property ----------------------------------------------------------------------------------------------------

CARDS = [
    # (interface, device, vendor, model, whether it is a ConnectX-7)
    ("enp1s0f0np0", "rocep1s0f0", "0x15b3", "0x1021", True),
    ("enP2p1s0f0np0", "roceP2p1s0f0", "0x15b3", "0x1021", True),
    ("enp1s0f1np1", "mlx5_7", "0x15b3", "0x1021", True),
    ("rail9", "mlx5_3", "0x15b3", "0x1021", True),
    ("enp1s0f0np0x", "mlx5_1", "0x15b3", "0x101b", False),
    ("enp129s0f0np0", "rocep129s0f0", "0x15b3", "0x1017", False),
    ("enp5s0f1np1", "bnxt_re0", "0x14e4", "0x1750", False),
    ("enP7s7", "", "0x10ec", "0x8127", False),
    ("wlP9s9", "", "0x14c3", "0x7925", False),
    ("eth5", "rxe0", "", "", False),
    ("enp1s0f1np1s", "irdma0", "0x8086", "0x1592", False),
    ("enp9s0f0np0", "rocep9s0f0", "0x14e4", "0x1021", False),  # another vendor's, with the number of our model
    ("docker0", "", "", "", False),
]


def random_node(folder: Path, chance: random.Random) -> tuple[Bundle, set[str], dict[str, set[str]]]:
    """A node with some cards, some of them up and addressed; returns also its CX7 devices, and what each may carry."""
    bundle, ours, own, entries = Bundle(folder), set(), {}, []
    for number, (netdev, hca, vendor, model, cx7) in enumerate(chance.sample(CARDS, chance.randrange(2, len(CARDS)))):
        address = f"10.{number}.0.{chance.randrange(1, 250)}"
        info = [v4(address)] if chance.random() < 0.8 else []
        flags = ["UP", "LOWER_UP"] if chance.random() < 0.8 else ["UP"]
        entries.append({"ifname": netdev, "flags": flags, "mtu": 9000, "addr_info": info})
        if not hca:
            continue
        device = f"sys/class/infiniband/{hca}"
        if vendor:
            bundle.put(f"{device}/device/vendor", vendor).put(f"{device}/device/device", model)
        bundle.put(f"{device}/device/net/{netdev}/.keep", "").put(f"{device}/ports/1/state", "4: ACTIVE")
        if cx7:
            ours.add(hca)
        own[hca] = {address} if info else set()
        for index in range(chance.randrange(0, 8)):
            carried = chance.choice([address, address, f"10.{number}.0.251", f"10.{(number + 1) % 9}.0.7"])
            text = chance.choice([mapped(carried), "fe80:0:0:0:0:0:0:1", "0:0:0:0:0:0:0:0"])
            bundle.put(f"{device}/ports/1/gids/{index}", text)
            bundle.put(f"{device}/ports/1/gid_attrs/types/{index}", chance.choice(["RoCE v2", "IB/RoCE v1"]))
    chance.shuffle(entries)
    return bundle.put("ip-addr.json", json.dumps(entries)), ours, own


def test_never_another_card_and_never_another_address(tmp_path, fabric):
    """Whatever a node holds: only ConnectX-7 devices, and only RoCE v2 GIDs that carry an address of that interface."""
    chosen = 0
    for seed in range(180):
        bundle, ours, own = random_node(tmp_path / str(seed), random.Random(seed))
        code, document = fabric(bundle.folder)
        if code:
            continue
        chosen += 1
        assert set(document["environment"]["NCCL_IB_HCA"].split(",")) <= ours, seed
        for rail in document["rails"]:
            port = bundle.folder / f"sys/class/infiniband/{rail['hca']}/ports/1"
            assert rail["address"] in own[rail["hca"]], seed
            assert (port / f"gids/{rail['gid_index']}").read_text() == mapped(rail["address"]), seed
            assert (port / f"gid_attrs/types/{rail['gid_index']}").read_text() == "RoCE v2", seed
        index = document["environment"].get("NCCL_IB_GID_INDEX")
        assert index is None or {str(rail["gid_index"]) for rail in document["rails"]} == {index}, seed
    assert chosen >= 15  # or the property says nothing
