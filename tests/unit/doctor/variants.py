"""One fault a variant: how a healthy bundle is changed, and exactly what the doctor then finds on top of ALWAYS.

NODE: title -> (change of one node's bundle, expected findings). PAIR: the same for the folder of both nodes, whose
healthy state already shows {"F11 info", "F12 info"}: the second node's GIDs are at index 5.
LINES: (expected finding, file, line): a line that is appended to a log. VARIANTS: all of them by title.
"""

from __future__ import annotations

import json
import os

from bundles import FIXTURES, healthy

TWINS = ("enp1s0f0np0", "enP2p1s0f0np0")
HCAS = ("rocep1s0f0", "roceP2p1s0f0")
ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
TABLE_HEAD = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]    MsgRate[Mpps]\n"


# ---- steps -----------------------------------------------------------------------------------------------------------


def nothing(b):
    pass


def link(*names, up=False):
    """Give interfaces a link, or take it."""
    flags = ["BROADCAST", "MULTICAST", "UP", "LOWER_UP"] if up else ["NO-CARRIER", "BROADCAST", "MULTICAST", "UP"]
    return lambda b: b.ip(lambda e: [e[name].update(flags=flags) for name in names])


def states(text, *hcas):
    """Set the port state of RDMA devices, and nothing in the other listings."""

    def step(b):
        for hca in hcas:
            b.put(f"sys/class/infiniband/{hca}/ports/1/state", text)
        b.drop("ibdev2netdev.txt", "rdma-link.txt")

    return step


def v4(address, prefix=24):
    return {"family": "inet", "local": address, "prefixlen": prefix, "scope": "global"}


def v6(address, scope="global"):
    return {"family": "inet6", "local": address, "prefixlen": 64, "scope": scope}


def steps(*several):
    def step(b):
        for one in several:
            one(b)

    return step


def gid(hca, index, value, kind="RoCE v2", netdev=""):
    """Set one entry of a GID table."""

    def step(b):
        port = f"sys/class/infiniband/{hca}/ports/1"
        b.put(f"{port}/gids/{index}", value + "\n").put(f"{port}/gid_attrs/types/{index}", kind + "\n")
        b.put(f"{port}/gid_attrs/ndevs/{index}", netdev + "\n")
        if "show_gids.txt" in [path.name for path in b.folder.iterdir()]:
            b.drop("show_gids.txt")

    return step


def mapped(address):
    """A GID that carries an IPv4 address."""
    return "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*map(int, address.split(".")))


def moved(old, new, *hcas):
    """Move an entry of GID tables."""

    def step(b):
        for hca in hcas:
            value = (b.folder / f"sys/class/infiniband/{hca}/ports/1/gids/{old}").read_text().strip()
            gid(hca, old, ZERO)(b)
            gid(hca, new, value)(b)

    return step


def append(name, line):
    def step(b):
        path = b.folder / name
        b.put(name, (path.read_text() if path.exists() else "") + line + "\n")

    return step


def put(name, text):
    return lambda b: b.put(name, text)


def take(name, fixture):
    return lambda b: b.take(name, fixture)


def drop(*names):
    return lambda b: b.drop(*names)


def only(*names):
    return lambda b: b.only(*names)


def port_one(b):
    """The cable is in the other socket."""
    for old, new in (("f0np0", "f9np9"), ("f1np1", "f0np0"), ("f9np9", "f1np1")):
        b.rename(old, new)
    for old, new in (("s0f0", "s0f9"), ("s0f1", "s0f0"), ("s0f9", "s0f1")):
        for prefix in ("rocep1", "roceP2p1"):
            b.rename(prefix + old, prefix + new)


def mlx5(b):
    """The RDMA devices have the kernel's own names."""
    for number, hca in enumerate(("rocep1s0f0", "rocep1s0f1", "roceP2p1s0f0", "roceP2p1s0f1")):
        b.rename(hca, f"mlx5_{number}")


def shuffled(*names):
    return lambda b: [b.edit(name, lambda text: "\n".join(reversed(text.splitlines())) + "\n") for name in names]


def vlan(b):
    """Each rail is a VLAN on its port."""

    def change(entries):
        for twin in TWINS:
            entries[f"{twin}.100"] = dict(entries[twin]) | {"ifname": f"{twin}.100", "link": twin}
            entries[twin]["addr_info"] = []

    b.ip(change)
    for twin, hca in zip(TWINS, HCAS, strict=True):
        for index in (2, 3):
            b.put(f"sys/class/infiniband/{hca}/ports/1/gid_attrs/ndevs/{index}", f"{twin}.100\n")


def bond(b):
    """Both twins hang on one bond, which alone has an address; its GID is on the first."""

    def change(entries):
        entries["bond0"] = dict(entries[TWINS[0]]) | {"ifname": "bond0"}
        for twin in TWINS:
            entries[twin] |= {"addr_info": [], "master": "bond0"}

    b.ip(change)


def bond_without_gids(b):
    bond(b)
    for hca in HCAS:
        gid(hca, 2, ZERO)(b)
        gid(hca, 3, ZERO)(b)


def v6_only(b):
    b.ip(lambda e: [e[twin].update(addr_info=[v6("2001:db8:1::10"), v6("fe80::1", "link")]) for twin in TWINS])


def foreign_card(b):
    """Another vendor's card with RDMA and a name like ours, up and addressed."""

    def change(entries):
        entries["enp129s0f0np0"] = dict(entries[TWINS[0]]) | {"ifname": "enp129s0f0np0", "mtu": 1500}
        entries["enp129s0f0np0"]["addr_info"] = [v4("198.51.100.9")]

    b.ip(change)
    b.put("sys/class/infiniband/bnxt_re0/device/vendor", "0x14e4\n")
    b.put("sys/class/infiniband/bnxt_re0/device/net/enp129s0f0np0/.keep", "")
    b.put("sys/class/infiniband/bnxt_re0/ports/1/state", "4: ACTIVE\n")
    b.put("sys/class/infiniband/bnxt_re0/ports/1/gids/0", ZERO + "\n")
    append("ibdev2netdev.txt", "bnxt_re0 port 1 ==> enp129s0f0np0 (Up)")(b)


def nameless_card(b):
    """Another card of the same maker under names that tell nothing, and nothing that tells of its hardware."""
    b.ip(
        lambda e: e.update(eth1=dict(e[TWINS[0]]) | {"ifname": "eth1", "mtu": 1500, "addr_info": [v4("198.51.100.9")]})
    )
    b.put("sys/class/infiniband/mlx5_0/device/net/eth1/.keep", "")
    b.put("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    gid("mlx5_0", 3, mapped("198.51.100.9"))(b)


def hardware_says(b):
    """Names that mislead: the hardware tells who is whose twin."""
    for twin in TWINS:
        b.put(f"sys/class/net/{twin}/phys_port_name", "p1\n").put(f"sys/class/net/{twin}/phys_switch_id", "ab12\n")
        b.put(f"sys/class/net/{twin}/device/vendor", "0x15b3\n").put(f"sys/class/net/{twin}/device/device", "0x1021\n")
        b.put(f"sys/class/net/{twin}/carrier", "1\n")


def netplan(**files):
    def step(b):
        b.drop("netplan")
        for name, text in files.items():
            b.put(f"netplan/{name.replace('_', '-').lstrip('-')}.yaml", text)

    return step


GOOD_NETPLAN = (FIXTURES / "netplan/good/40-cx7.yaml").read_text()
OTHER_NETPLAN = GOOD_NETPLAN.replace("192.168.100.10", "192.168.200.1").replace("192.168.101.10", "192.168.201.1")


def matched_netplan(b):
    """One file names the ports, another means them by a glob."""
    netplan(_40_cx7=GOOD_NETPLAN)(b)
    text = "network: {version: 2, ethernets: {rails: {match: {name: 'enp1s0f0*'}, addresses: [10.9.0.1/24]}}}\n"
    b.put("netplan/90-NM-1.yaml", text)


def truncated(name, part=0.4):
    return lambda b: b.put(name, (b.folder / name).read_bytes()[: int((b.folder / name).stat().st_size * part)])


def noise(*names):
    return lambda b: [b.put(name, bytes(range(256)) * 64) for name in names]


def bandwidth(*rows, head=TABLE_HEAD, device=""):
    text = (f" Device         : {device}\n" if device else "") + head
    return put(
        "ib_write_bw.txt", text + "".join(f" 65536      927940           0.00  {row}  0.185548\n" for row in rows)
    )


def two_runs(*rates, hcas=HCAS):
    def run(hca, rate):
        return f" Device         : {hca}\n{TABLE_HEAD} 65536      927940           0.00  {rate}  0.185548\n"

    return put("ib_write_bw.txt", "".join(run(hca, rate) for hca, rate in zip(hcas, rates, strict=True)))


def collective(busbw, size=17179869184, ranks=(0, 1)):
    names = "".join(f"#  Rank  {rank} Group  0 Pid 1 on spark device  0 [0x01] NVIDIA GB10\n" for rank in ranks)
    row = f" {size}  134217728  float  none  -1  700000  24.5  {busbw}  0  700000  24.5  {busbw}  0\n"
    head = f"# nThread 1 nGpus 1 minBytes {size} maxBytes {size} step: 2(factor)\n# Using devices\n"
    return put("nccl-tests.txt", head + names + row + f"# Avg bus bandwidth    : {busbw}\n")


def memory(**kilobytes):
    def change(text):
        lines = dict(line.split(":", 1) for line in text.splitlines())
        return "".join(f"{k}: {kilobytes.get(k, v.split()[0])} kB\n" for k, v in lines.items())

    return lambda b: b.edit("meminfo", change)


def gpu_row(watts, busy):
    row = f"| N/A   60C    P0             {watts}W /  N/A  | Not Supported          |     {busy}%      Default |\n"
    return put("nvidia-smi-table.txt", row)


def unaddressed(*names):
    return lambda b: b.ip(lambda e: [e[name].update(addr_info=[]) for name in names])


def second_cable(b):
    link("enp1s0f1np1", "enP2p1s0f1np1", up=True)(b)
    states("4: ACTIVE\n", "rocep1s0f1", "roceP2p1s0f1")(b)


def hit_rates(*rates, speculation=True):
    lines = [f"INFO Engine 000: Running: 1 reqs, Prefix cache hit rate: {rate}%\n" for rate in rates]
    return put("engine.log", "".join(lines) + ("INFO SpecDecoding metrics: …\n" if speculation else ""))


def reachable_twins(b):
    """Both rails in one subnet, with GIDs and everything else in order."""
    b.take("ip-addr.json", "ip_j_addr/same_subnet.json")
    for index, kind in ((2, "IB/RoCE v1"), (3, "RoCE v2")):
        gid("roceP2p1s0f0", index, mapped("192.168.100.11"), kind)(b)
    b.edit("netplan/40-cx7.yaml", lambda text: text.replace("192.168.101.10", "192.168.100.11"))


# ---- one node --------------------------------------------------------------------------------------------------------

NODE = {
    # healthy, in every shape
    "healthy": (nothing, set()),
    "healthy, cable in port 1": (port_one, set()),
    "healthy, mlx5_N names": (mlx5, set()),
    "healthy, mlx5_N names, port 1": (steps(port_one, mlx5), set()),
    "healthy, lines reversed": (shuffled("ibdev2netdev.txt", "show_gids.txt", "rdma-link.txt", "meminfo", "hosts"), set()),
    "healthy, CRLF": (lambda b: [b.edit(n, lambda t: t.replace("\n", "\r\n")) for n in ("ibdev2netdev.txt", "hosts")], set()),
    "healthy, entries of ip reversed": (lambda b: b.edit("ip-addr.json", lambda t: json.dumps(json.loads(t)[::-1])), set()),
    "healthy, byte-order mark": (lambda b: b.put("ip-addr.json", b"\xef\xbb\xbf" + (b.folder / "ip-addr.json").read_bytes()), set()),
    "healthy, only sysfs and addresses": (only("sys", "ip-addr.json"), set()),
    "healthy, only addresses": (only("ip-addr.json"), set()),
    "healthy, only sysfs": (only("sys"), set()),
    "healthy, only ibdev2netdev": (only("ibdev2netdev.txt"), set()),
    "healthy, only show_gids": (only("show_gids.txt"), set()),
    "healthy, only rdma link": (only("rdma-link.txt"), set()),
    "healthy, only netplan": (only("netplan"), set()),
    "healthy, VLANs": (vlan, set()),
    "healthy, another card": (foreign_card, set()),
    "healthy, hardware names the port": (hardware_says, set()),
    "healthy, a second address on a rail": (
        steps(lambda b: b.ip(lambda e: e[TWINS[0]]["addr_info"].append(v4("192.168.100.200"))), gid(HCAS[0], 9, mapped("192.168.100.200"))),
        {"F11 info"},
    ),
    "healthy, a second address without a GID": (lambda b: b.ip(lambda e: e[TWINS[0]]["addr_info"].append(v4("10.9.9.9"))), set()),
    "healthy, a second address and the first one pinned": (
        steps(
            lambda b: b.ip(lambda e: e[TWINS[0]]["addr_info"].append(v4("10.9.9.9"))), gid(HCAS[0], 9, mapped("10.9.9.9")),
            append("nccl.log", "NCCL INFO NCCL_IB_GID_INDEX set by environment to 3."),
        ),
        {"F11 info"},
    ),
    "healthy, a nameless card": (nameless_card, set()),
    "healthy, NCCL's line cut off": (put("nccl.log", "NET/IB : Using [0]rocep1s0f0:1/RoCE [1]roceP2p1"), set()),
    "healthy, rdma link cut off within a word": (
        lambda b: b.edit("rdma-link.txt", lambda t: t[: t.index("state ACTIVE", t.index("roceP2p1s0f0")) + len("state ACT")]), set()),
    "healthy, a log in another script": (
        steps(put("engine.log", "99%|\u2588\u2588\u2588\u2588\u2588\u2588\u2588\u2588| \u4f60\u597d\n"), only("engine.log")), set()),
    "healthy, noise for the states of ports": (states("\x93\x01~\n", *HCAS, "rocep1s0f1", "roceP2p1s0f1"), set()),
    "healthy, a pipe in sysfs": (lambda b: os.mkfifo(b.put("sys/class/net/enp1s0f0np0/mtu", "9000").drop("sys/class/net/enp1s0f0np0/mtu").folder / "sys/class/net/enp1s0f0np0/mtu"), set()),
    "healthy, netplan with addresses that are none": (put("netplan/50-x.yaml", "network: {ethernets: {enp1s0f0np0: {addresses: 5}}}\n"), set()),
    "healthy, an endless interface name": (lambda b: b.put("sys/class/net/enp1s0f0np0/mtu", "9000").ip(lambda e: e["enP7s7"].update(ifname="x" * 5000)), set()),
    "healthy, IPv6 beside IPv4": (lambda b: b.ip(lambda e: e[TWINS[0]]["addr_info"].append(v6("2001:db8::1"))), set()),
    "healthy, management has IPv6 only": (lambda b: b.ip(lambda e: e["enP7s7"].update(addr_info=[v6("2001:db8::5")])), set()),
    "healthy, interface names lost from sysfs": (
        steps(lambda b: [b.drop(f"sys/class/infiniband/{h}/device") for h in HCAS], drop("ibdev2netdev.txt", "rdma-link.txt", "show_gids.txt")), set()),
    "healthy, links of sysfs that lead nowhere": (
        steps(lambda b: [b.drop(f"sys/class/infiniband/{h}") or (b.folder / f"sys/class/infiniband/{h}").symlink_to("/nowhere") for h in HCAS],
              drop("ibdev2netdev.txt", "rdma-link.txt", "show_gids.txt"), mlx5), set()),
    "healthy, operstate for flags": (lambda b: b.ip(lambda e: [e[t].pop("flags") for t in TWINS]), set()),
    "healthy, swap off": (memory(SwapTotal=0, SwapFree=0), set()),
    "healthy, an engine holds the memory": (
        steps(
            memory(MemFree=4000000, MemAvailable=6000000),
            append("nvidia-smi-table.txt", "|    0   N/A  N/A            6330      C   VLLM::Worker_TP0                      96073MiB |"),
        ),
        set(),
    ),
    "healthy, insufficient power on the slot": (append("journal.txt", "kernel: mlx5_core 0000:01:00.0: mlx5_pcie_event:326:(pid 3202): Detected insufficient power on the PCIe slot (27W)."), set()),
    "healthy, a sweep of sizes": (
        put("ib_write_bw.txt", TABLE_HEAD + " 2 5000 0.05 0.05 3.1\n 4096 5000 61.0 60.1 1.8\n 65536 5000 97.5 97.3 0.18\n"), set()),
    "healthy, MiB a second": (
        bandwidth("11596.9", head=TABLE_HEAD.replace("Gb/sec", "MiB/sec")), set()),
    "healthy, a peer that is gone beside one that answers": (
        put("ip-neigh.json", json.dumps([
            {"dst": "192.168.100.77", "dev": TWINS[0], "state": ["FAILED"]},
            {"dst": "192.168.100.11", "dev": TWINS[0], "state": ["REACHABLE"]},
            {"dst": "192.0.2.77", "dev": "enP7s7", "state": ["FAILED"]}])), set()),
    "healthy, multicast blocked on a rail": (append("journal.txt", "kernel: [UFW BLOCK] IN=enp1s0f0np0 OUT= SRC=192.168.100.11 DST=224.0.0.251 PROTO=UDP SPT=5353 DPT=5353"), set()),
    "healthy, a container killed in its own limit": (append("journal.txt", "kernel: oom-kill:constraint=CONSTRAINT_MEMCG,task=node,pid=1"), set()),
    "healthy, an adapter's controller that is back": (append("journal.txt", "kernel: mlx5_core 0000:01:00.0: irisc not responding"), set()),
    "healthy, the same addresses in two files": (netplan(_40_cx7=GOOD_NETPLAN, _41_cx7=GOOD_NETPLAN), set()),
    "healthy, other Xid": (append("journal.txt", "kernel: NVRM: Xid (PCI:000f:01:00): 154, GPU recovery action changed"), set()),
    "healthy, AER of another device": (append("journal.txt", "kernel: pcieport 0004:00:00.0: AER: Corrected error message received from 0004:01:00.0"), set()),
    "healthy, two ranks' collective": (collective("22.4"), set()),
    "healthy, a small collective": (collective("1.2", size=1048576), set()),
    "healthy, hits in the prefix cache": (hit_rates(*["0.0"] * 25, "41.5"), set()),
    "healthy, nothing to hit": (steps(hit_rates(*["0.0"] * 25), lambda b: b.edit("engine.log", lambda t: t.replace("Running: 1", "Running: 0"))), set()),
    "healthy, no speculation and no hits": (hit_rates(*["0.0"] * 25, speculation=False), set()),
    "healthy, pinned to its own index": (append("nccl.log", "NCCL INFO NCCL_IB_GID_INDEX set by environment to 3."), set()),
    "healthy, explicit KV bytes with room left": (append("engine.log", "This does not respect the gpu_memory_utilization config."), set()),
    "healthy, netplan with DHCP elsewhere": (put("netplan/50-cloud-init.yaml", "network: {version: 2, ethernets: {enP7s7: {dhcp4: true}, enp1s0f0np0: {optional: true}}}\n"), set()),
    "healthy, an empty netplan file": (put("netplan/10-empty.yaml", ""), set()),
    "healthy, a backup beside netplan's files": (put("netplan/40-cx7.yaml.bak", ":::\t{"), set()),
    # damage of the bundle itself
    "empty ibdev2netdev, others healthy": (put("ibdev2netdev.txt", ""), set()),
    "ibdev2netdev cut in half": (truncated("ibdev2netdev.txt"), set()),
    "show_gids cut in half": (steps(truncated("show_gids.txt"), drop("sys", "ibdev2netdev.txt", "rdma-link.txt")), set()),
    "rdma link cut in half": (truncated("rdma-link.txt"), set()),
    "meminfo cut in half": (truncated("meminfo"), set()),
    "bad JSON of ip": (truncated("ip-addr.json"), set()),
    "ip printed an object": (put("ip-addr.json", "{}"), set()),
    "ip printed numbers": (put("ip-addr.json", "[1, 2, null]"), set()),
    "wrong types in ip's JSON": (
        put("ip-addr.json", json.dumps([{"ifname": TWINS[0], "flags": 7, "mtu": "big", "addr_info": [3, {"local": 5}]}, {"ifname": 9}])),
        {"F15 stop"},
    ),
    "noise in every text": (
        noise("ibdev2netdev.txt", "show_gids.txt", "rdma-link.txt", "meminfo", "hosts", "limits", "engine.log", "nccl.log",
              "journal.txt", "nvidia-smi.csv", "nvidia-smi-table.txt", "dgx-release", "ib_write_bw.txt", "ip-neigh.json"),
        set(),
    ),
    "every text empty": (
        lambda b: [b.put(p.name, "") for p in b.folder.iterdir() if p.is_file() and p.name != "ip-addr.json"], set()),
    "folders under the names of files": (
        lambda b: [b.drop(n) and (b.folder / n).mkdir() for n in ("meminfo", "hosts", "nccl.log")], set()),
    # F01
    "F01 the trap": (take("ib_write_bw.txt", "perftest/ib_write_bw_13gbps_row.txt"), {"F01 stop"}),
    "F01 one of two rails": (two_runs("97.28", "13.23"), {"F01 stop"}),
    "F01 just below the floor": (bandwidth("79.9"), {"F01 stop"}),
    "F01 in MiB a second": (bandwidth("1577.1", head=TABLE_HEAD.replace("Gb/sec", "MiB/sec")), {"F01 stop"}),
    "F01 irisc": (steps(drop("ib_write_bw.txt"), append("journal.txt", "kernel: mlx5_core 0000:01:00.0: irisc not responding")), {"F01 stop"}),
    "F01 collective": (collective("1.6"), {"F01 stop"}),
    # F02
    "F02 all down": (take("ibdev2netdev.txt", "ibdev2netdev/all_down.txt"), {"F02 stop"}),
    "F02 all down, alone": (steps(take("ibdev2netdev.txt", "ibdev2netdev/all_down.txt"), only("ibdev2netdev.txt")), {"F02 stop"}),
    "F02 empty listing, alone": (steps(put("ibdev2netdev.txt", ""), only("ibdev2netdev.txt")), {"F02 stop"}),
    "F02 empty sysfs": (steps(lambda b: b.sysfs("sysfs_no_cable"), only("sys")), {"F02 stop"}),
    "F02 no GIDs at all": (steps(take("show_gids.txt", "show_gids/no_cable.txt"), only("show_gids.txt")), {"F02 stop"}),
    "F02 no CX7 interface": (steps(lambda b: b.ip(lambda e: [e.pop(n) for n in list(e) if n.startswith(("enp1", "enP2"))]), only("ip-addr.json")), {"F02 stop"}),
    "F02 no cable, the whole node": (
        steps(lambda b: b.sysfs("sysfs_no_cable"), put("ibdev2netdev.txt", ""), put("rdma-link.txt", ""),
              take("show_gids.txt", "show_gids/no_cable.txt"), drop("nccl.log", "netplan"),
              lambda b: b.ip(lambda e: [e.pop(n) for n in list(e) if n.startswith(("enp1", "enP2"))])), {"F02 stop"}),
    "F02 no carrier": (link(*TWINS), {"F02 stop"}),
    "F02 administratively down": (lambda b: b.ip(lambda e: [e[t].update(flags=["BROADCAST"]) for t in TWINS]), {"F02 stop"}),
    "F02 RDMA half down": (states("1: DOWN\n", *HCAS), {"F02 stop"}),
    "F02 no RDMA device": (steps(lambda b: b.sysfs("sysfs_no_cable"), drop("ibdev2netdev.txt", "rdma-link.txt", "show_gids.txt")), {"F02 stop"}),
    # F03
    "F03 address on one twin": (unaddressed(TWINS[1]), {"F03 warn"}),
    "F03 one twin without link": (link(TWINS[1]), {"F03 warn"}),
    "F03 in ibdev2netdev alone": (
        steps(only("ibdev2netdev.txt"), lambda b: b.edit("ibdev2netdev.txt", lambda t: t.replace("enP2p1s0f0np0 (Up)", "enP2p1s0f0np0 (Down)"))), {"F03 warn"}),
    "F03 bond": (bond, {"F03 warn"}),
    "F03 NCCL took one": (put("nccl.log", "NET/IB : Using [0]rocep1s0f0:1/RoCE [RO]; OOB enP7s7:192.0.2.11<0>\n"), {"F03 warn"}),
    "F03 one rail's collective": (collective("11.3"), {"F03 warn"}),
    "F02 sysfs alone lost the devices": (lambda b: b.sysfs("sysfs_no_cable"), {"F02 stop"}),
    "F02 another card's RDMA alone": (
        steps(foreign_card, drop("ibdev2netdev.txt", "rdma-link.txt", "show_gids.txt", *[f"sys/class/infiniband/{h}" for h in (*HCAS, "rocep1s0f1", "roceP2p1s0f1")])), {"F02 stop"}),
    # F06-F09
    "F06 two cables": (second_cable, {"F06 warn"}),
    "F06 two cables in ibdev2netdev": (steps(only("ibdev2netdev.txt"), lambda b: b.edit("ibdev2netdev.txt", lambda t: t.replace("Down", "Up"))), {"F06 warn"}),
    "F07 two lanes": (put("sys/class/net/enP2p1s0f0np0/device/current_link_width", "2\n"), {"F07 warn"}),
    "F08 a heading and no row": (put("ib_write_bw.txt", "                    RDMA_Write BW Test\n" + TABLE_HEAD + "-" * 80 + "\n"), {"F08 warn"}),
    "F08 ibhosts": (append("ib_write_bw.txt", "ibwarn: [123] mad_rpc_open_port: can't open UMAD port ((null):0)"), {"F08 warn"}),
    "F09 AER": (append("journal.txt", "kernel: pcieport 0002:00:00.0: AER: Corrected error message received from 0002:01:00.0"), {"F09 warn"}),
    "F09 bus error": (append("journal.txt", "kernel: mlx5_core 0000:01:00.0: PCIe Bus Error: severity=Correctable"), {"F09 warn"}),
    "F06 by one listing": (lambda b: b.edit("ibdev2netdev.txt", lambda t: t.replace("Down", "Up")), {"F06 warn"}),
    # F10-F13
    "F10 empty": (steps(lambda b: b.sysfs("sysfs_gid3_empty"), take("show_gids.txt", "show_gids/gid3_empty.txt")), {"F10 stop"}),
    "F10 empty, sysfs alone": (steps(lambda b: b.sysfs("sysfs_gid3_empty"), only("sys")), {"F10 stop"}),
    "F10 empty, show_gids alone": (steps(take("show_gids.txt", "show_gids/gid3_empty.txt"), only("show_gids.txt")), {"F10 stop"}),
    "F10 another's address": (gid(HCAS[0], 3, mapped("192.168.100.77")), {"F10 stop"}),
    "F10 v1 only": (gid(HCAS[1], 3, mapped("192.168.101.10"), "IB/RoCE v1"), {"F10 stop"}),
    "F10 one twin empty, no addresses known": (steps(gid(HCAS[1], 3, ZERO), only("sys")), {"F10 stop"}),
    "F10 bond without GIDs": (bond_without_gids, {"F03 warn", "F10 stop"}),
    "F10 pinned to an empty entry": (append("nccl.log", "NCCL INFO NCCL_IB_GID_INDEX set by environment to 5."), {"F10 stop", "F11 stop"}),
    "F11 shifted": (steps(moved(3, 5, *HCAS)), {"F11 info"}),
    "F11 shifted and pinned": (
        steps(moved(3, 5, *HCAS), gid(HCAS[0], 3, "fe80:0:0:0:0:0:0:7"), gid(HCAS[1], 3, "fe80:0:0:0:0:0:0:8"),
              append("engine.log", "NCCL_IB_GID_INDEX=3")), {"F11 stop"}),
    "F11 shifted, and another node's": (lambda b: b.sysfs("sysfs_gid_shift5"), {"F10 stop", "F11 info"}),
    "F11 no link-local": (moved(3, 1, *HCAS), {"F11 info"}),
    "F13 empty": (append("engine.log", "environment: NCCL_NET=IB NCCL_IB_GID_INDEX= NCCL_IB_HCA=rocep1s0f0"), {"F13 stop"}),
    "F13 null": (append("engine.log", "NCCL_IB_GID_INDEX:"), {"F13 stop"}),
    "F13 quoted": (append("engine.log", 'export NCCL_IB_GID_INDEX=""'), {"F13 stop"}),
    # F14-F17
    "F14 one subnet": (reachable_twins, {"F14 stop"}),
    "F14 one subnet, addresses alone": (steps(take("ip-addr.json", "ip_j_addr/same_subnet.json"), only("ip-addr.json")), {"F14 stop"}),
    "F14 one subnet that works": (steps(reachable_twins, two_runs("97.28", "92.57")), {"F14 warn"}),
    "F14 one rail measured": (steps(reachable_twins, bandwidth("97.28", device=HCAS[0])), {"F14 stop"}),
    "F14 one rail measured twice": (steps(reachable_twins, two_runs("97.28", "92.57", hcas=(HCAS[0], HCAS[0]))), {"F14 stop"}),
    "F14 works, yet a neighbour is silent": (
        steps(reachable_twins, two_runs("97.28", "92.57"), take("ip-neigh.json", "ip_j_neigh/failed_6.1.0.json")), {"F14 stop", "F19 warn"}),
    "F14 in netplan": (steps(drop("netplan"), take("netplan/40-cx7.yaml", "netplan/bad_same_subnet/40-cx7.yaml"), only("netplan")), {"F14 stop"}),
    "F14 a wide prefix": (lambda b: b.ip(lambda e: [e[t]["addr_info"][0].update(prefixlen=16) for t in TWINS]), {"F14 stop"}),
    "F14 VLANs in one subnet": (steps(vlan, lambda b: b.ip(lambda e: [e[f"{t}.100"]["addr_info"][0].update(prefixlen=16) for t in TWINS])), {"F14 stop"}),
    "F14 a rail's address on another interface too": (lambda b: b.ip(lambda e: e["enP7s7"].update(addr_info=[v4("192.168.100.10", 32)])), {"F14 stop"}),
    "F14 one address on both twins": (
        steps(lambda b: b.ip(lambda e: e[TWINS[1]].update(addr_info=[v4("192.168.100.10")])), gid(HCAS[1], 3, mapped("192.168.100.10"))), {"F14 stop"}),
    "F15 lost": (take("ip-addr.json", "ip_j_addr/lost_after_reboot.json"), {"F15 stop"}),
    "F15 an address that a port gave itself": (
        lambda b: b.ip(lambda e: [e[twin].update(addr_info=[v4("169.254.3.4", 16) | {"scope": "link"}]) for twin in TWINS]), {"F15 stop"}),
    "F15 IPv6 only": (steps(v6_only, only("ip-addr.json")), {"F15 stop"}),
    "F15 IPv6 only, with its GIDs": (
        steps(v6_only, *[gid(h, i, ZERO) for h in HCAS for i in (2, 3)], gid(HCAS[0], 3, "2001:db8:1::10")), {"F15 stop", "F10 stop"}),
    "F15 lost, with its GIDs": (
        steps(take("ip-addr.json", "ip_j_addr/lost_after_reboot.json"), lambda b: b.sysfs("sysfs_gid3_empty"), drop("show_gids.txt")), {"F15 stop", "F10 stop"}),
    "F16 two files": (netplan(_40_cx7=GOOD_NETPLAN, _99_nvidia_sync_cluster=OTHER_NETPLAN), {"F16 stop"}),
    "F16 by a glob": (matched_netplan, {"F16 stop"}),
    "F17 broken": (put("netplan/90-NM-4f1c.yaml", "network:\n  ethernets:\n\tbad: [\n"), {"F17 stop"}),
    "F17 noise": (noise("netplan/90-NM-4f1c.yaml"), {"F17 stop"}),
    "F17 a list": (put("netplan/90-NM-4f1c.yaml", "- network\n"), {"F17 stop"}),
    "F17 over WiFi": (put("ip-route.json", '[{"dst":"default","gateway":"192.0.2.1","dev":"wlP9s9","flags":[]}]'), {"F17 info"}),
    # F18-F29
    "F18 twins differ": (take("ip-addr.json", "ip_j_addr/mtu_one_side_1500.json"), {"F18 stop"}),
    "F18 both small": (lambda b: b.ip(lambda e: [e[t].update(mtu=1500) for t in TWINS]), {"F18 warn"}),
    "F19 failed": (take("ip-neigh.json", "ip_j_neigh/failed_6.1.0.json"), {"F19 warn"}),
    "F19 failed, alone": (steps(take("ip-neigh.json", "ip_j_neigh/failed_6.1.0.json"), only("ip-neigh.json")), {"F19 warn"}),
    "F21 RoCE dropped": (append("journal.txt", "kernel: [UFW BLOCK] IN=enp1s0f0np0 OUT= MAC= SRC=192.168.100.11 DST=192.168.100.10 LEN=60 PROTO=UDP SPT=50000 DPT=4791"), {"F21 stop"}),
    "F21 bootstrap dropped": (append("journal.txt", "kernel: nft drop IN=enP2p1s0f0np0 OUT= SRC=192.168.101.11 DST=192.168.101.10 PROTO=TCP SPT=50000 DPT=43211"), {"F21 stop"}),
    "F23 a name of the other node": (append("engine.log", "GLOO_SOCKET_IFNAME=enp1s0f1np1"), {"F23 stop"}),
    "F24 the trap": (take("hosts", "hosts/bad_127_0_1_1.txt"), {"F24 stop"}),
    "F24 127.0.0.1": (put("hosts", "127.0.0.1 localhost spark-a\n"), {"F24 stop"}),
    "F24 another name on 127.0.0.1": (put("hosts", "127.0.0.1 localhost myapp.test\n# 127.0.1.1 spark-a\n"), set()),
    "F25 a tenth of the cable": (collective("0.93"), {"F25 stop"}),
    "F26 memlock": (put("limits", "Max locked memory         8388608              8388608              bytes\n"), {"F26 stop"}),
    "F26 no lock": (append("nccl.log", "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"), {"F26 stop"}),
    "F27 KHO": (memory(CmaTotal=0, CmaFree=10171392), {"F27 warn"}),
    "F27 KHO, not F26": (steps(memory(CmaTotal=0, CmaFree=10171392), append("nccl.log", "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory")), {"F27 warn"}),
    "F28 two worlds": (collective("0.00", ranks=(0, 0)), {"F28 warn"}),
    "F28 no result": (put("nccl-tests.txt", "# nThread 1 nGpus 1 minBytes 8\n# Avg bus bandwidth    : 0\n"), {"F28 warn"}),
    "F29 16 GB": (
        steps(memory(MemAvailable=30000000, MemFree=30000000),
              put("nccl-tests.txt", "# nThread 1 nGpus 1 minBytes 17179869184 maxBytes 17179869184\n#  Rank  0 on a\n#  Rank  1 on b\n")),
        {"F29 stop", "F30 warn"}),
    # memory
    "F30 page cache": (take("meminfo", "meminfo/page_cache_full.txt"), {"F30 warn"}),
    "F30 nothing available": (memory(MemFree=9000000, MemAvailable=60000000), {"F30 warn"}),
    "F31 by a hair": (
        append("engine.log", "ValueError: Free memory on device cuda:0 (107.45/123.72 GiB) on startup is less than desired GPU memory utilization (0.87, 107.64 GiB)."),
        {"F30 warn", "F31 info"}),
    "F31 by a hair, an older engine": (
        append("engine.log", "ValueError: Free memory on device (107.45/123.72 GiB) on startup is less than desired GPU memory utilization (0.87, 107.64 GiB)."),
        {"F30 warn", "F31 info"}),
    "F33 swap": (memory(SwapTotal=16777212), set()),  # already in ALWAYS
    "F36 nothing left": (steps(memory(MemAvailable=1005568, MemFree=1005568), append("engine.log", "This does not respect the gpu_memory_utilization config.")), {"F36 warn", "F30 warn"}),
    "F39 the last line": (put("engine.log", "INFO CustomAllreduce is disabled because this process group spans across nodes.\n\n"), {"F39 warn"}),
    "F39 busy at 18 W": (gpu_row(18, 96), {"F39 warn", "F71 warn"}),
    "busy at 95 W": (gpu_row(95, 96), set()),
    # driver and identity
    "F45 590": (put("nvidia-smi.csv", "NVIDIA GB10, [N/A], 590.48.01\n"), {"F45 warn"}),
    "F45 with a heading": (put("nvidia-smi.csv", "name, memory.total [MiB], driver_version\nNVIDIA GB10, [N/A], 610.57.04\n"), {"F45 warn"}),
    "F45 by the table alone": (
        steps(drop("nvidia-smi.csv"), append("nvidia-smi-table.txt", "| NVIDIA-SMI 610.57.04   Driver Version: 610.57.04   CUDA Version: 13.3 |")), {"F45 warn"}),
    "F69 no name": (take("nvidia-smi.csv", "nvidia_smi/query_mem_na.csv"), {"F69 warn"}),
    "F69 no GPU": (take("nvidia-smi.csv", "nvidia_smi/no_devices.txt"), {"F69 stop"}),
    "F72 a serial number": (put("dgx-release", 'DGX_NAME="DGX Spark"\nDGX_SERIAL_NUMBER=1234567890\n'), set()),  # in ALWAYS
    "F73 64 GB": (take("meminfo", "meminfo/spark_64gb.txt"), {"F73 stop"}),
    "R1 the last line": (put("engine.log", "INFO start\nTuning fp4_gemm:   0%|          | 0/12\r"), {"R1 stop"}),
    "R1 an earlier round": (put("engine.log", "Tuning fp4_gemm:   0%|          | 0/12\nINFO Application startup complete.\n"), set()),
    "R9 no hits": (hit_rates(*["0.0"] * 25), {"R9 warn"}),
}  # fmt: skip

# ---- a line in a log -------------------------------------------------------------------------------------------------

LINES = [
    ("F07 warn", "journal.txt", "LnkSta: Speed 32GT/s, Width x2 (downgraded)"),
    ("F07 warn", "journal.txt", "mlx5_core 0002:01:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 32.0 GT/s PCIe x2 link"),
    ("F10 stop", "nccl.log", "NCCL WARN Call to ibv_modify_qp failed with 61 No data available"),
    ("F10 stop", "engine.log", "worker GID index 3 is EMPTY on rocep1s0f0"),
    ("F13 stop", "nccl.log", "NCCL INFO NCCL_IB_GID_INDEX set by environment to 0."),
    ("F18 stop", "nccl.log", "NET/IB: Got completion from peer with status=1 IBV_WC_LOC_LEN_ERR"),
    ("F19 warn", "nccl.log", "NCCL WARN NET/IB: Got completion from peer with status=IBV_WC_RETRY_EXC_ERR(12)"),
    ("F21 stop", "nccl-tests.txt", "A daemon failed to report back"),
    ("F23 stop", "engine.log", "RuntimeError: [enforce fail at ...gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: enp1s0f1np1"),
    ("F23 stop", "engine.log", "environment: {'GLOO_SOCKET_IFNAME': 'ens5'}"),
    ("F23 stop", "nccl.log", "NCCL_SOCKET_IFNAME set by environment to enp1s0f1np1"),
    ("F24 stop", "engine.log", "Unable to resolve hostname to a (local) address. Using the loopback address as fallback."),
    ("F24 stop", "engine.log", "Gloo connectFullMesh failed with ... remote=[127.0.0.1]:4242"),
    ("F25 stop", "nccl.log", "NCCL INFO Failed to initialize NET plugin IB"),
    ("F25 stop", "nccl.log", "NCCL INFO NET/Socket : Using [0]enP7s7:192.0.2.11<0>"),
    ("F25 stop", "nccl.log", "NCCL INFO Using network Socket"),
    ("F25 stop", "nccl.log", "NCCL INFO Assigned NET plugin Socket to comm"),
    ("F30 warn", "engine.log", "ValueError: Free memory on device cuda:0 (99.33/121.69 GiB) on startup is less than desired GPU memory utilization (0.87, 105.87 GiB). Decrease GPU memory utilization"),
    ("F32 stop", "engine.log", "RuntimeError: buffer_size (1268776960 B) exceeds device memory budget (693237760 B)"),
    ("F33 stop", "journal.txt", "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359"),
    ("F33 stop", "journal.txt", "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task=python3"),
    ("F33 stop", "journal.txt", "kernel: Out of memory: Killed process 6330 (VLLM::Worker) total-vm:1024kB"),
    ("F34 info", "journal.txt", "spark-a earlyoom[812]: sending SIGTERM to process 6330 uid 1000 \"VLLM::Worker\""),
    ("F35 stop", "engine.log", "To serve at least one request with the models's max seq len (1000000), (17.51 GiB KV cache is needed"),
    ("F37 warn", "engine.log", "Error: No available node types can fulfill resource request {'GPU': 1.0, 'node:192.0.2.12': 0.001}"),
    ("F37 warn", "engine.log", "Every node should have a unique IP address. Got 2 nodes with 3 unique IP addresses"),
    ("F38 warn", "engine.log", "RuntimeError: Version mismatch: The cluster was started with:"),
    ("F40 stop", "engine.log", "vllm serve: error: unrecognized arguments: --enable-prompt-tokens-details"),
    ("F41 stop", "engine.log", "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'"),
    ("F42 stop", "engine.log", "RuntimeError: No supported CUDA architectures found for major versions [10]."),
    ("F44 stop", "engine.log", "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    ("F44 stop", "engine.log", "CUDA error: no kernel image is available for execution on the device"),
    ("F45 warn", "engine.log", "ERROR: This container was built for NVIDIA Driver Release 590.48 or later, but version 580.159.03 was detected"),
    ("F46 stop", "nvidia-smi-table.txt", "Failed to initialize NVML: Driver/library version mismatch"),
    ("F47 warn", "engine.log", "Failed to initialize NVML: Unknown Error"),
    ("F48 warn", "journal.txt", "open /var/lib/docker/tmp/docker-import-1/blobs/sha256/ab: no such file or directory"),
    ("F49 warn", "journal.txt", "failed to resolve source metadata for docker.io/x@sha256:0: no such host"),
    ("F50 warn", "journal.txt", "unknown or invalid runtime name: nvidia"),
    ("F50 warn", "journal.txt", 'could not select device driver "" with capabilities: [[gpu]]'),
    ("F51 warn", "journal.txt", "Downloading (incomplete total...):  99%|x| 49.7G/50.0G [29:00<20:28, 218kB/s]"),
    ("F52 warn", "journal.txt", "Download complete: : | 0.00B"),
    ("F53 stop", "engine.log", "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer"),
    ("F53 stop", "engine.log", "Error while deserializing header: incomplete metadata, file not fully covered"),
    ("F58 warn", "journal.txt", "neither hf nor huggingface-cli found"),
    ("F59 warn", "journal.txt", "DSpark head container already exists for project deepseek-v4-flash. Stop it first"),
    ("F61 warn", "journal.txt", "Host key verification failed."),
    ("F61 warn", "journal.txt", "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @"),
    ("F61 warn", "journal.txt", "avahi-browse not found. Please install avahi-utils package."),
    ("F64 warn", "journal.txt", "error: externally-managed-environment"),
    ("R2 stop", "engine.log", "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory."),
    ("R3 stop", "engine.log", "RayWorkerProc rank=[0] died unexpectedly"),
    ("R4 stop", "engine.log", "nvcc error : 'cicc' died due to signal 9 (Kill signal)"),
    ("R4 stop", "journal.txt", "kernel: Memory cgroup out of memory: Killed process 4242 (cicc) total-vm:1024kB"),
    ("R4 stop", "journal.txt", "oom-kill:constraint=CONSTRAINT_MEMCG,task=cicc,pid=4242"),
    ("R5 warn", "engine.log", "WARNING Triton kernel JIT compilation during inference: _fwd_kernel"),
    ("R7 stop", "engine.log", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    ("R8 stop", "journal.txt", "NVRM: Xid (PCI:000f:01:00): 31, pid=6330, name=VLLM::Worker, MMU Fault"),
    ("R8 stop", "journal.txt", "NVRM: Xid (PCI:000f:01:00): 43, pid=6330, name=VLLM::Worker"),
]  # fmt: skip

# ---- both nodes ------------------------------------------------------------------------------------------------------


def first(step):
    return lambda a, b: step(a)


def second(step):
    return lambda a, b: step(b)


def both(step):
    return lambda a, b: (step(a), step(b))


def same_rail_address(a, b):
    b.ip(lambda e: e[TWINS[0]].update(addr_info=[v4("192.168.100.10")]))
    gid(HCAS[0], 5, mapped("192.168.100.10"))(b)


def small_end(a, b):
    b.ip(lambda e: [e[twin].update(mtu=4200) for twin in TWINS])


PAIR = {
    "healthy": (first(nothing), set()),
    "healthy, one bridge's address on both": (
        both(lambda b: b.ip(lambda e: e.update(l4tbr0=dict(e["docker0"]) | {"ifname": "l4tbr0", "addr_info": [v4("192.168.55.1")]}))), set()),
    "healthy, one GID index": (second(moved(5, 3, *HCAS)), {"-F11 info", "-F12 info"}),
    "F04 other sockets": (second(port_one), {"F04 warn"}),
    "F04 by one listing": (
        second(lambda b: b.edit("ibdev2netdev.txt", lambda t: t.replace("Up", "?").replace("Down", "Up").replace("?", "Down"))), {"F04 warn"}),
    "F12 pinned": (both(append("nccl.log", "NCCL INFO NCCL_IB_GID_INDEX set by environment to 3.")), {"F12 stop", "-F12 info", "F11 stop", "-F11 info"}),
    "F14 one address twice": (same_rail_address, {"F14 stop"}),
    "F14 one management address twice": (second(lambda b: b.ip(lambda e: e["enP7s7"].update(addr_info=[v4("192.0.2.11")]))), {"F14 stop"}),
    "F18 unequal ends": (small_end, {"F18 stop"}),
    "F18 equal and small": (both(lambda b: b.ip(lambda e: [e[t].update(mtu=1500) for t in TWINS])), {"F18 warn"}),
    "F45 other driver": (second(put("nvidia-smi.csv", "NVIDIA GB10, [N/A], 580.142\n")), {"F45 warn"}),
    "R1 one rank tunes": (first(put("engine.log", "Tuning gemm:   0%|")), {"R1 stop"}),
    "R1 both tune": (both(put("engine.log", "Tuning gemm:   0%|")), set()),
    "R10 caches differ": (
        lambda a, b: (a.put("engine.log", "INFO GPU KV cache size: 1,754,237 tokens\n"), b.put("engine.log", "INFO GPU KV cache size: 883,552 tokens\n")),
        {"R10 warn"}),
    "one node's fault": (second(take("hosts", "hosts/bad_127_0_1_1.txt")), {"F24 stop"}),
}  # fmt: skip
PAIR_ALWAYS = {"F11 info", "F12 info"}


def signed(expected):
    """PAIR_ALWAYS with what a variant adds, and without what it marks with a minus."""
    return (PAIR_ALWAYS | {one for one in expected if one[0] != "-"}) - {one[1:] for one in expected if one[0] == "-"}


def node_variant(change):
    return lambda folder: change(healthy(folder / "spark-a")) and None or folder / "spark-a"


def line_variant(file, line):
    """The neighbours of the healthy node are left out: RoCE retries and a neighbour that answers are no pair."""
    return node_variant(steps(drop("ip-neigh.json"), append(file, line)))


def pair_variant(change):
    return lambda folder: (
        change(healthy(folder / "spark-a"), healthy(folder / "spark-b", other=True)) and None or folder
    )


# title -> (makes the variant below a folder and returns the folder to diagnose, expected findings)
VARIANTS = {title: (node_variant(change), expected) for title, (change, expected) in NODE.items()}
VARIANTS |= {f"line {n}: {found}": (line_variant(file, line), {found}) for n, (found, file, line) in enumerate(LINES)}
VARIANTS |= {f"pair: {title}": (pair_variant(change), signed(expected)) for title, (change, expected) in PAIR.items()}
