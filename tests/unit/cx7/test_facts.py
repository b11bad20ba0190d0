# SPDX-License-Identifier: Apache-2.0
"""Which interfaces count as ConnectX-7 ports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def netdev(sysfs: Path, name: str, pci: str = "", driver: str = "", carrier: str | None = "1", **files: str) -> None:
    """One interface below sysfs, with a PCI device and driver where they are named."""
    net = sysfs / "class/net" / name
    net.mkdir(parents=True)
    if carrier is not None:
        (net / "carrier").write_text(carrier + "\n")
    for file, text in {"mtu": "1500", "speed": "200000", "address": "00:00:5e:00:53:01", **files}.items():
        (net / file).write_text(text + "\n")
    if pci:
        device, bound = sysfs / "devices" / pci, sysfs / "bus/pci/drivers" / driver
        device.mkdir(parents=True, exist_ok=True)
        bound.mkdir(parents=True, exist_ok=True)
        if not (device / "driver").exists():
            (device / "driver").symlink_to(bound)
        (net / "device").symlink_to(device)


@pytest.fixture
def facts(plugin):
    return plugin("modules/cx7_facts.py")


def found(facts, sysfs: Path, entries: list | None = None) -> list[dict]:
    """What the module says about a recorded node."""
    sources = facts.discovery.Sources(sysfs=sysfs, addresses=entries or [])
    return facts.ports_of(facts.discovery.discover(sources))


def names(facts, sysfs: Path) -> list[str]:
    return [p["netdev"] for p in found(facts, sysfs)]


def test_a_spark_in_the_order_of_port_and_domain(facts, tmp_path, fixtures):
    for port in (0, 1):
        netdev(tmp_path, f"enP2p1s0f{port}np{port}", f"0002:01:00.{port}", "mlx5_core")
        netdev(tmp_path, f"enp1s0f{port}np{port}", f"0000:01:00.{port}", "mlx5_core")
    ports = found(facts, tmp_path, json.loads((fixtures / "ip_j_addr/healthy.json").read_text()))
    assert [(p["netdev"], p["port"], p["domain"]) for p in ports] == [
        ("enp1s0f0np0", 0, 0),
        ("enP2p1s0f0np0", 0, 2),
        ("enp1s0f1np1", 1, 0),
        ("enP2p1s0f1np1", 1, 2),
    ]
    assert [p["addresses"] for p in ports] == [["192.168.100.10/24"], ["192.168.101.10/24"], [], []]


def test_a_veth_under_the_same_name(facts, tmp_path):
    netdev(tmp_path, "enP2p1s0f1np1")
    assert found(facts, tmp_path)[0] == {
        "netdev": "enP2p1s0f1np1",
        "port": 1,
        "domain": 2,
        "pci": "",
        "driver": "",
        "hca": "",
        "width": None,
        "carrier": True,
        "speed": 200000,
        "mtu": 1500,
        "mac": "00:00:5e:00:53:01",
        "addresses": [],
    }


def test_a_renamed_port_is_known_by_its_hardware(facts, tmp_path):
    netdev(tmp_path, "rail0", "0002:01:00.1", "mlx5_core", phys_port_name="p1")
    assert [(p["port"], p["domain"]) for p in found(facts, tmp_path)] == [(1, 2)]


@pytest.mark.parametrize(
    ("name", "pci", "driver"),
    [
        ("enp1s0f0np0", "0000:05:00.0", "bnxt_en"),
        ("enP7s7", "0007:01:00.0", "r8127"),
        ("docker0", "", ""),
        ("eth0", "", ""),
    ],
)
def test_foreign_interfaces_are_ignored(facts, tmp_path, name, pci, driver):
    netdev(tmp_path, name, pci, driver)
    assert names(facts, tmp_path) == []


def test_a_virtual_function_is_no_port(facts, tmp_path):
    netdev(tmp_path, "enp1s0f1np1", "0000:01:00.5", "mlx5_core")
    (tmp_path / "devices/0000:01:00.5/physfn").mkdir()
    assert names(facts, tmp_path) == []


def test_a_port_that_is_down_does_not_tell_its_carrier(facts, tmp_path):
    netdev(tmp_path, "enp1s0f1np1", carrier=None, speed="-1")
    port = found(facts, tmp_path)[0]
    assert (port["carrier"], port["speed"]) == (None, None)


def test_nothing_on_the_bus(facts, tmp_path):
    assert found(facts, tmp_path) == []


def test_management_prefers_the_default_route(facts):
    others = {"docker0": ["172.17.0.1/16"], "eth0": ["192.0.2.5/24"], "wlan0": ["198.51.100.7/24"]}
    assert facts.management(others, [{"dst": "default", "dev": "wlan0"}]) == "198.51.100.7"
    assert facts.management(others, []) == "192.0.2.5"
    assert facts.management({"docker0": ["172.17.0.1/16"]}, []) == ""
