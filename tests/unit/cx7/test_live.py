# SPDX-License-Identifier: Apache-2.0
"""What the modules that touch the rails ask of the system, and what they say when a rail is wrong."""

from __future__ import annotations

import json

import pytest

RAIL = {"netdev": "enp1s0f0np0", "address": "192.168.100.10", "prefix": 24, "subnet": "192.168.100.0/24",
        "peer": "192.168.100.11", "mtu": 9000}  # fmt: skip


@pytest.mark.parametrize(
    ("recorded", "lacking"),
    [
        ("healthy", []),
        ("lost_after_reboot", ["enp1s0f0np0 does not carry 192.168.100.10/24.", "enp1s0f0np0 has MTU 1500, not 9000."]),
    ],
)
def test_drift(plugin, fixtures, recorded, lacking):
    path = fixtures / f"ip_j_addr/{recorded}.json"
    assert plugin("modules/cx7_netplan.py").drift([RAIL], json.loads(path.read_text())) == lacking


def test_an_interface_that_is_gone(plugin):
    assert plugin("modules/cx7_netplan.py").drift([RAIL], [{}]) == ["enp1s0f0np0 does not exist."]


@pytest.mark.parametrize("renderer", ["networkd", "NetworkManager"])
def test_only_our_interfaces_are_touched(plugin, renderer):
    commands = plugin("modules/cx7_netplan.py").commands(renderer, ["one", "two"])
    assert commands[0] == ["netplan", "generate"]
    assert not any("apply" in command for command in commands)
    if renderer == "networkd":
        assert commands[-1] == ["networkctl", "reconfigure", "one", "two"]
    else:
        assert [command[-1] for command in commands[-2:]] == ["netplan-one", "netplan-two"]


def answers(*codes: int):
    left = list(codes)
    return lambda args: (left.pop(0), "rtt min/avg/max/mdev = 0.100/0.200/0.300/0.010 ms")


@pytest.mark.parametrize(
    ("codes", "adopted", "sentence"),
    [
        ((1, 0, 0), False, ""),
        (
            (1, 1),
            False,
            "enp1s0f0np0 (192.168.100.10 to 192.168.100.11): the peer does not answer; check that the QSFP cable",
        ),
        ((1, 1), True, "found here and adopted"),
        ((0, 1), False, "small pings pass, 8972 bytes do not; set MTU 9000"),
    ],
)
def test_pings(plugin, codes, adopted, sentence):
    result, said = plugin("modules/cx7_ping.py").probe(RAIL, adopted, 2, answers(*codes))
    assert (sentence in said) if sentence else not said
    assert result["rtt_ms"] == (None if sentence else 0.2)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("ib_write_bw_healthy_row", ""),
        ("ib_write_bw_13gbps_row", "13.2 Gb/s, below the floor of 80; the port is wedged"),
    ],
)
def test_bandwidth(plugin, fixtures, file, sentence):
    module = plugin("modules/cx7_bandwidth.py")
    output = (fixtures / f"perftest/{file}.txt").read_text()
    said = module.verdict("rail", module.average(output), 80, output)
    assert (sentence in said) if sentence else not said


def test_a_table_without_numbers_is_no_measurement(plugin):
    module = plugin("modules/cx7_bandwidth.py")
    header = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]    MsgRate[Mpps]\n"
    assert module.average(header) is None
    assert "measured nothing" in module.verdict("rail", None, 80, header)
    assert "seat the cable" in module.verdict("rail", 60.0, 80, "")
