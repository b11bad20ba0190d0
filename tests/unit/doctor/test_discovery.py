"""What counts as a ConnectX-7 port, and who is whose twin."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundles import Bundle
from glm_vllm_overlay.node.discovery import Sources, discover


def net(bundle: Bundle, name: str, **files: str) -> None:
    """One interface in sys/class/net; `__` in a name of a file stands for a folder."""
    bundle.put(f"sys/class/net/{name}/carrier", "1\n")
    for file, text in files.items():
        bundle.put(f"sys/class/net/{name}/{file.replace('__', '/')}", f"{text}\n")


def card(bundle: Bundle, name: str, pci: str, port: str, switch: str = "") -> None:
    """A function of a ConnectX-7 as the copy of a bundle shows it."""
    files = {"device__vendor": "0x15b3", "device__device": "0x1021", "phys_port_name": port}
    files |= {"device__uevent": f"DRIVER=mlx5_core\nPCI_SLOT_NAME={pci}"} | (
        {"phys_switch_id": switch} if switch else {}
    )
    net(bundle, name, **files)


def groups(folder: Path) -> list[list[str]]:
    return [[port.netdev for port in group] for group in discover(Sources(sysfs=folder / "sys")).groups()]


@pytest.mark.parametrize(
    "switches", [("a", "a", "a", "a"), ("a", "b", "a", "b"), ("a", "b", "c", "d"), ("", "", "", "")]
)
def test_twins_are_paired_by_hardware_whatever_their_names(tmp_path, switches):
    """One switch id for the chip, one a controller, one a function, or none."""
    bundle = Bundle(tmp_path / "node")
    places = [
        ("x1", "0000:01:00.0", "p0"),
        ("a9", "0002:01:00.0", "p0"),
        ("a1", "0000:01:00.1", "p1"),
        ("x9", "0002:01:00.1", "p1"),
    ]
    for (name, pci, port), switch in zip(places, switches, strict=True):
        card(bundle, name, pci, port, switch)
    assert groups(bundle.folder) == [["x1", "a9"], ["a1", "x9"]]


def test_names_that_mislead_lose_against_the_hardware(tmp_path):
    bundle = Bundle(tmp_path / "node")
    card(bundle, "enp1s0f0np0", "0000:01:00.1", "p1", "a")
    card(bundle, "enP2p1s0f1np1", "0002:01:00.1", "p1", "a")
    found = discover(Sources(sysfs=bundle.folder / "sys"))
    assert [(port.netdev, port.port, port.domain) for port in found.ports] == [
        ("enp1s0f0np0", 1, 0),
        ("enP2p1s0f1np1", 1, 2),
    ]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("enp1s0f0np0", {"device__vendor": "0x14e4", "device__device": "0x1750"}),  # a Broadcom card in its place
        ("enp1s0f0np0", {"device__vendor": "0x15b3", "device__device": "0x101d"}),  # an older Mellanox
        ("enp1s0f0np0", {"device__vendor": "0x15b3", "device__device": "0x1021", "device__physfn__x": "1"}),  # a VF
        ("enp129s0f0np0", {}),
        ("eth0", {}),
        ("eth0", {"device__vendor": "0x15b3"}),  # of the same maker, and no word of the model
        ("wlP9s9", {}),
        ("enp1s0f0np0.100", {}),
    ],
)
def test_no_port(tmp_path, name, files):
    bundle = Bundle(tmp_path / "node")
    net(bundle, name, **files)
    assert discover(Sources(sysfs=bundle.folder / "sys")).ports == []


@pytest.mark.parametrize(
    ("name", "hca"), [("enp1s0f0np0", "rxe0"), ("fabric0", "mlx5_0"), ("eth3", "roceP2p1s0f1"), ("enp1s0f1np1", "")]
)
def test_a_port_without_word_of_its_hardware(tmp_path, name, hca):
    listing = f"{hca} port 1 ==> {name} (Up)\n" if hca else ""
    entries = [{"ifname": name, "flags": ["UP", "LOWER_UP"], "mtu": 9000, "addr_info": []}]
    assert [port.netdev for port in discover(Sources(addresses=entries, ibdev2netdev=listing)).ports] == [name]


@pytest.mark.parametrize(
    ("name", "hca"), [("eth3", "rxe0"), ("eno1", "irdma0"), ("enp65s0f0np0", "mlx5_2"), ("wlP9s9", "rxe0")]
)
def test_another_cards_rdma_makes_no_port(name, hca):
    listing = f"{hca} port 1 ==> {name} (Up)\n"
    entries = [{"ifname": name, "flags": ["UP", "LOWER_UP"], "mtu": 9000, "addr_info": []}]
    found = discover(Sources(addresses=entries, ibdev2netdev=listing))
    assert (found.ports, found.hcas) == ([], {})


def test_an_alternative_name_will_do():
    entries = [{"ifname": "lan9", "altnames": ["enP2p1s0f1np1"], "flags": ["UP"], "addr_info": []}]
    port = discover(Sources(addresses=entries)).ports[0]
    assert (port.netdev, port.port, port.domain, port.link) == ("lan9", 1, 2, False)


def test_rdma_in_software_is_never_a_ports_device():
    listing = "".join(f"{hca} port 1 ==> enp1s0f0np0 (Up)\n" for hca in ("rxe0", "rocep1s0f0", "siw_enp1s0f0np0"))
    found = discover(Sources(ibdev2netdev=listing))
    assert ([port.hca for port in found.ports], set(found.hcas)) == (["rocep1s0f0"], {"rocep1s0f0"})
