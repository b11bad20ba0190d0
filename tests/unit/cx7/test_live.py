# SPDX-License-Identifier: Apache-2.0
"""What the modules that touch the rails ask of the system, and what they say when a rail is wrong."""

from __future__ import annotations

import json

import pytest

RAIL = {"netdev": "enp1s0f0np0", "address": "192.168.100.10", "prefix": 24, "subnet": "192.168.100.0/24",
        "peer": "192.168.100.11", "peers": {"b": "192.168.100.11"}, "theirs": {"b": 0}, "mtu": 9000}  # fmt: skip


def links(fixtures, recorded: str) -> dict:
    return {e["ifname"]: e for e in json.loads((fixtures / f"ip_j_addr/{recorded}.json").read_text()) if "ifname" in e}


@pytest.mark.parametrize(
    ("recorded", "lacking"),
    [
        ("healthy", []),
        ("lost_after_reboot", ["enp1s0f0np0 does not carry 192.168.100.10/24.", "enp1s0f0np0 has MTU 1500, not 9000."]),
    ],
)
def test_drift(plugin, fixtures, recorded, lacking):
    assert plugin("modules/cx7_change.py").drift([RAIL], ["enp1s0f0np0"], links(fixtures, recorded)) == lacking


def test_an_interface_that_is_gone(plugin):
    assert plugin("modules/cx7_change.py").drift([RAIL], [], {}) == ["enp1s0f0np0 does not exist."]


def test_what_is_carried_besides_or_by_another_port_is_drift(plugin, fixtures):
    found = links(fixtures, "healthy")
    extra = {"family": "inet", "local": "10.0.0.1", "prefixlen": 8, "scope": "global"}
    found["enp1s0f0np0"]["addr_info"].append(extra)
    stray = {"family": "inet", "local": "192.168.100.10", "prefixlen": 24, "scope": "global"}
    found["enp1s0f1np1"] = {"addr_info": [stray]}
    assert plugin("modules/cx7_change.py").drift([RAIL], ["enp1s0f0np0", "enp1s0f1np1"], found) == [
        "enp1s0f0np0 carries 10.0.0.1/8 besides.",
        "enp1s0f1np1 still carries 192.168.100.10/24.",
    ]


@pytest.mark.parametrize("netplan", [True, False])
@pytest.mark.parametrize("renderer", ["networkd", "NetworkManager"])
def test_only_our_interfaces_are_touched(plugin, renderer, netplan):
    commands = plugin("modules/cx7_change.py").applying(renderer, netplan, ["one", "two"])
    assert (commands[0] == ["netplan", "generate"]) == netplan
    assert not any("apply" in command for command in commands)
    if renderer == "networkd":
        assert commands[-1] == ["networkctl", "reconfigure", "one", "two"]
    else:
        assert [command[-1] for command in commands[-2:]] == ["netplan-one", "netplan-two"]


def test_the_way_back_gives_addresses_and_mtu_as_they_were(plugin, fixtures):
    commands = plugin("modules/cx7_change.py").restoring([RAIL], links(fixtures, "lost_after_reboot"))
    assert commands == [
        ["ip", "address", "del", "192.168.100.10/24", "dev", "enp1s0f0np0"],
        ["ip", "link", "set", "dev", "enp1s0f0np0", "mtu", "1500"],
    ]
    commands = plugin("modules/cx7_change.py").restoring([RAIL], links(fixtures, "healthy"))
    assert ["ip", "address", "replace", "192.168.100.10/24", "dev", "enp1s0f0np0"] in commands


def test_an_edit_that_was_never_applied_is_seen(plugin, tmp_path):
    differences = plugin("modules/cx7_change.py").differences
    for side, text in (("before", "a"), ("after", "b")):
        folder = tmp_path / side / "run/systemd/network"
        folder.mkdir(parents=True)
        (folder / "10-netplan-eth0.network").write_text(text)
        (folder / "10-netplan-rail.network").write_text(text)
        (folder / "10-other.network").write_text(text)
    found = differences(tmp_path / "before", tmp_path / "after", ["rail"])
    assert found == ["run/systemd/network/10-netplan-eth0.network"]


# ---- whose files ----------------------------------------------------------------------------------------------------

NETPLAN = "network: {{version: 2, ethernets: {{{0}}}}}\n"


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("etc/netplan/40-cx7.yaml", NETPLAN.format("rail: {mtu: 9000}"), True),
        ("run/netplan/40-cx7.yaml", NETPLAN.format("rail: {mtu: 9000}"), True),
        ("etc/netplan/60-ours.yaml", NETPLAN.format("rail: {mtu: 9000}"), False),
        ("etc/netplan/40-cx7.yaml", NETPLAN.format("eth0: {dhcp4: true}"), False),
        ("etc/netplan/40-cx7.yaml", NETPLAN.format("all: {match: {name: 'ra*'}}"), True),
        ("etc/netplan/40-cx7.yaml", NETPLAN.format("rail: {match: {name: 'eth*'}}"), False),
        ("etc/netplan/40-cx7.yaml", NETPLAN.format("x: {match: {macaddress: '00:00:5E:00:53:01'}}"), True),
        ("etc/netplan/40-cx7.yaml", "network: {version: 2}\n", False),
        ("etc/netplan/40-cx7.yaml", "", False),
        ("etc/netplan/90-NM-x.yaml", "network: [rail: {\n", True),
        ("etc/netplan/90-NM-x.yaml", "network: [trailer: {\n", False),
        ("etc/NetworkManager/system-connections/r.nmconnection", "[connection]\ninterface-name=rail\n", True),
        ("etc/NetworkManager/system-connections/r.nmconnection", "[connection]\ninterface-name=eth0\n", False),
        ("etc/NetworkManager/system-connections/r.nmconnection", "\x00rubbish", False),
        ("etc/systemd/network/10.network", "[Match]\nName=en* ra*\n", True),
        (
            "etc/systemd/network/10.network",
            "[Match]\nName=en*\n[Network]\nAddress=1.2.3.4/5\nAddress=2.3.4.5/6\n",
            False,
        ),
        ("etc/network/interfaces", "auto rail\niface rail inet static\n", True),
        ("etc/network/interfaces.d/x", "iface rail0 inet static\n", False),
    ],
)
def test_which_files_configure_an_interface(plugin, tmp_path, path, text, found):
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    interface = {"netdev": "rail", "mac": "00:00:5e:00:53:01"}
    said = plugin("modules/cx7_owners.py").owners(tmp_path, [interface], ["/etc/netplan/60-ours.yaml"])
    assert said["files"] == {"rail": [f"/{path}"] if found else []}


def test_a_file_is_shown_without_its_secrets(plugin, tmp_path):
    folder = tmp_path / "etc/NetworkManager/system-connections"
    folder.mkdir(parents=True)
    (folder / "w").write_text("[connection]\ninterface-name=rail\n[wifi-security]\npsk=hunter2\n")
    said = plugin("modules/cx7_owners.py").owners(tmp_path, [{"netdev": "rail"}], [])
    assert "hunter2" not in str(said) and "psk=(hidden)" in str(said)


# ---- /etc/hosts ------------------------------------------------------------------------------------------------------

LINES = ["192.168.177.11 spark-a.fabric", "192.168.177.12 spark-b.fabric"]


def test_the_hosts_file_loses_the_trap_and_is_given_back(plugin, fixtures):
    hosts = plugin("modules/cx7_hosts.py")
    before = (fixtures / "hosts/bad_127_0_1_1.txt").read_bytes()
    after, moved = hosts.with_ours(before, LINES, "spark-a", "192.168.177.11")
    effective = [line for line in after.decode().splitlines() if not line.startswith("#")]
    assert not any(line.startswith("127.0.1.1") for line in effective)
    assert "192.168.177.11 spark-a" in effective and moved == ["spark-a"]
    assert hosts.with_ours(hosts.without_ours(after), LINES, "spark-a", "192.168.177.11") == (after, moved)
    assert hosts.without_ours(after) == before


def test_a_later_edit_of_the_hosts_file_stays(plugin, fixtures):
    hosts = plugin("modules/cx7_hosts.py")
    before = (fixtures / "hosts/bad_127_0_1_1.txt").read_bytes()
    after, _ = hosts.with_ours(before, LINES, "spark-a", "192.168.177.11")
    assert hosts.without_ours(after + b"192.0.2.1 later\n") == before + b"192.0.2.1 later\n"


@pytest.mark.parametrize("text", [b"", b"127.0.0.1 localhost", b"127.0.0.1 localhost\r\n\xff\xfe # \n", b"127.0.1.1 x"])
def test_any_hosts_file_is_given_back_byte_by_byte(plugin, text):
    hosts = plugin("modules/cx7_hosts.py")
    after, _ = hosts.with_ours(text, LINES, "x", "192.168.177.11")
    assert after != text and hosts.without_ours(after) == text


# ---- measuring -------------------------------------------------------------------------------------------------------


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
        ((1, 1), True, "these addresses were found here"),
        ((0, 1), False, "small pings pass, 8972 bytes do not; set MTU 9000"),
    ],
)
def test_pings(plugin, codes, adopted, sentence):
    result, said = plugin("modules/cx7_ping.py").probe(RAIL, RAIL["peer"], adopted, 2, answers(*codes), [])
    assert (sentence in said) if sentence else not said
    assert result["rtt_ms"] == (None if sentence else 0.2)


@pytest.mark.parametrize(("second", "bound"), [("192.168.101.10", True), ("192.168.100.11", False)])
def test_the_answer_comes_back_on_the_rail_unless_the_rails_share_a_subnet(plugin, second, bound):
    first = {"netdev": "one", "address": "192.168.100.10", "prefix": 24}
    options = plugin("modules/cx7_ping.py").sources([first, first | {"netdev": "two", "address": second}])
    assert options == [
        ["-I", "192.168.100.10", *(["-I", "one"] if bound else [])],
        ["-I", second, *(["-I", "two"] if bound else [])],
    ]


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
    said = module.verdict("rail", "ib_write_bw", module.average("ib_write_bw", output), 80, output)
    assert (sentence in said) if sentence else not said


def test_a_table_without_numbers_is_no_measurement(plugin):
    module = plugin("modules/cx7_bandwidth.py")
    header = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]    MsgRate[Mpps]\n"
    assert module.average("ib_write_bw", header) is None
    assert "measured nothing" in module.verdict("rail", "ib_write_bw", None, 80, header)
    assert "seat the cable" in module.verdict("rail", "ib_write_bw", 60.0, 80, "")
    assert "seat the cable" in module.verdict("rail", "iperf3", 13.0, 80, "")
    assert module.average("iperf3", "iperf3: error - unable to connect") is None


ROW = " 65536      927940           0.00               {}                0.185548"


def rails() -> list[dict]:
    second = {
        "netdev": "enP2p1s0f0np0",
        "address": "192.168.101.10",
        "peers": {"b": "192.168.101.11"},
        "theirs": {"b": 1},
    }
    return [RAIL, RAIL | second]


@pytest.mark.parametrize(("together", "warned"), [(95.0, False), (49.0, True)])
def test_each_rail_alone_and_then_both(plugin, together, warned, monkeypatch):
    module = plugin("modules/cx7_bandwidth.py")
    monkeypatch.setattr(module, "PAUSE", 0)
    asked = []

    def run(command):
        asked.append(command)
        return 0, ROW.format(97.28 if len(asked) <= 2 else together), ""

    said = module.measured({"tool": "ib_write_bw", "to": ["b", "c"], "rails": rails(), "min_gbps": 80}, run)
    assert [command[-1] for command in asked[:2]] == ["192.168.100.11", "192.168.101.11"]
    assert sorted(command[command.index("-p") + 1] for command in asked) == ["18515", "18515", "18516", "18516"]
    assert [(r["gbps"], r["together_gbps"]) for r in said["rails"]] == [(97.28, together)] * 2
    assert said["against"] == [] and bool(said["warnings_found"]) == warned


def test_a_server_that_comes_late_is_asked_again_and_a_rail_without_numbers_is_no_pair(plugin, monkeypatch):
    module = plugin("modules/cx7_bandwidth.py")
    monkeypatch.setattr(module, "PAUSE", 0)
    outputs = [(1, "", "refused"), (0, ROW.format(97.0), ""), *[(0, "header only", "")] * 5]
    said = module.measured(
        {"tool": "ib_write_bw", "to": ["b"], "rails": rails(), "min_gbps": 80}, lambda command: outputs.pop(0)
    )
    assert [r["gbps"] for r in said["rails"]] == [97.0, None] and not outputs
    assert len(said["against"]) == 1 and "measured nothing (header only)" in said["against"][0]


def test_iperf3_is_read_as_it_prints(plugin):
    output = json.dumps({"start": {}, "end": {"sum_sent": {}, "sum_received": {"bits_per_second": 9.41e10}}})
    assert plugin("modules/cx7_bandwidth.py").average("iperf3", output) == pytest.approx(94.1)


# ---- what the nodes have alike, and the record -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "out", "value"),
    [(0, "580.126.09\n", "580.126.09"), (0, "[N/A]\n", None), (2, 'Field "x" is not valid\n', None), (0, "", None)],
)
def test_what_nvidia_smi_tells(plugin, code, out, value):
    assert plugin("modules/cx7_parity.py").query("x", code, out) == value


def test_firmware_of_the_rails(plugin, tmp_path):
    for hca, version in (("one", "28.45.4028"), ("two", "28.45.4028"), ("other", "1")):
        (tmp_path / hca).mkdir()
        (tmp_path / hca / "fw_ver").write_text(version + "\n")
    parity = plugin("modules/cx7_parity.py")
    assert parity.firmware(tmp_path, ["one", "two"]) == "28.45.4028"
    assert parity.firmware(tmp_path, ["none"]) is None


def record(when: str) -> dict:
    rail = {"node": "a", "netdev": "rail", "peer": "192.0.2.2", "bytes": 8972, "rtt_ms": 0.1, "gbps": 97.3,
            "together_gbps": 94.9}  # fmt: skip
    return {"schema": 1, "when": when, "tool": "ib_write_bw", "floor_gbps": 80, "adopted": True,
            "files": {"a": ["/etc/netplan/40-cx7.yaml"]}, "nodes": {}, "rails": [rail], "against": ["a: bad."],
            "warnings": ["look."]}  # fmt: skip


def test_the_newest_records_are_kept(plugin, tmp_path):
    module = plugin("modules/cx7_record.py")
    for minute in range(5):
        path = module.store(tmp_path / "fabric", record(f"2026-01-02T03:0{minute}:00Z"), 3)
    assert [f.name for f in sorted((tmp_path / "fabric").iterdir())] == [
        "2026-01-02T030200Z.json", "2026-01-02T030300Z.json", "2026-01-02T030400Z.json"]  # fmt: skip
    assert json.loads(path.read_text())["when"] == "2026-01-02T03:04:00Z"


def test_a_record_in_words(plugin):
    words = plugin("modules/cx7_record.py").words(record("2026-01-02T03:04:05Z"))
    assert words == [
        "measured 2026-01-02T03:04:05Z with ib_write_bw, floor 80 Gb/s",
        "adopted from /etc/netplan/40-cx7.yaml",
        "a rail to 192.0.2.2: 8972 bytes in 0.10 ms, 97.3 Gb/s, 94.9 Gb/s together",
        "a: bad.",
        "look.",
    ]
