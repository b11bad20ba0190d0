"""Detectors for NCCL, memory, driver and the engine's start; of one node and of all together."""

from __future__ import annotations

import re

from glm_vllm_overlay.node import discovery
from glm_vllm_overlay.node.evidence import Evidence
from glm_vllm_overlay.node.hits import LOGS, Hit, matching, said
from glm_vllm_overlay.node.measurements import GIB, meminfo

UTILISATION = 0.87
# kB; the smallest 128 GB Spark shows about 127.5 million.
SMALLEST_MEMORY = 100_000_000
MEMLOCK_FLOOR = 1 * GIB
IFNAME = re.compile(
    r"\b((?:NCCL|GLOO|TP)_SOCKET_IFNAME)(?: set (?:by environment )?to |[\"']?\s*[=:]\s*)[\"']?=?([\w.,@-]+)"
)


def wrong_interface(evidence: Evidence) -> Hit | None:
    """F23: a variable names an interface that this node does not have, or that has no IPv4 address."""
    if not evidence.addresses:
        return None
    usable = {entry["ifname"] for entry in evidence.addresses if discovery.ipv4(entry)} | {"lo"}
    for name, line, match in matching(evidence, LOGS, "_SOCKET_IFNAME", IFNAME):
        variable, value = match.groups()
        wanted = [word for word in value.split(",") if word]
        if wanted and not any(netdev.startswith(word) for word in wanted for netdev in usable):
            return Hit(f"{variable} names {value}, which has no IPv4 address on this node.", f"{name}: {line}")
    return None


def loopback_name(evidence: Evidence) -> Hit | None:
    """F24: /etc/hosts gives the host's own name a loopback address."""
    for line in (evidence.text("hosts") or "").splitlines():
        words = line.partition("#")[0].split()
        if len(words) < 2 or not words[0].startswith("127."):
            continue
        names = [name for name in words[1:] if not name.startswith(("localhost", "ip6-")) and name != "loopback"]
        own = [name for name in names if evidence.name and name.split(".")[0] == evidence.name.split(".")[0]]
        if own or (names and words[0].startswith("127.0.1.")):
            return Hit(
                f"/etc/hosts gives {(own or names)[0]} the address {words[0]}: Gloo and Ray announce it to the peer.",
                f"hosts: {line.strip()}",
            )
    return None


def tcp_fallback(evidence: Evidence) -> Hit | None:
    """F25: NCCL took TCP."""
    if not evidence.rdma:
        return None
    for needle, pattern in (
        ("NET/Socket", r"NET/Socket"),
        ("network Socket", r"Using network Socket"),
        ("NET plugin Socket", r"(Assigned|Initialized|Using) NET plugin Socket"),
        ("NET plugin IB", r"Failed to initialize NET plugin IB"),
    ):
        hit = said(needle, "NCCL fell back to TCP sockets: a tenth of the cable.", pattern)(evidence)
        if hit:
            return hit
    return None


def stranded_cma(evidence: Evidence) -> Hit | None:
    """F27: memory that the kernel has set aside and lost."""
    memory = meminfo(evidence)
    if memory.get("CmaTotal") != 0 or memory.get("CmaFree", 0) <= 0:
        return None
    lost = memory["CmaFree"] / 1024**2
    return Hit(
        f"The kernel has stranded {lost:.1f} GiB in CMA (KHO bug).",
        f"meminfo: CmaTotal: 0 kB, CmaFree: {memory['CmaFree']} kB",
    )


def low_memlock(evidence: Evidence) -> Hit | None:
    """F26: RDMA may lock too little memory."""
    match = re.search(r"^Max locked memory\s+(\d+|unlimited)\s+(\d+|unlimited)", evidence.text("limits") or "", re.M)
    if match and match[1] != "unlimited" and int(match[1]) < MEMLOCK_FLOOR:
        return Hit(
            f"The process may lock {int(match[1]) // 1024} KiB only: RDMA needs unlimited.", f"limits: {match[0]}"
        )
    return None


def no_lock(evidence: Evidence) -> Hit | None:
    """F26: registering memory failed, and no stranded CMA explains it."""
    if stranded_cma(evidence):
        return None
    return said("ibv_reg_mr", "RDMA could not lock memory.", r"ibv_reg_mr\w* failed.*Cannot allocate memory")(evidence)


def engine_runs(evidence: Evidence) -> bool:
    """Whether a process holds GPU memory, or this machine's engine is up."""
    rows = matching(evidence, ("nvidia-smi-table.txt",), "MiB", HOLDER)
    return evidence.busy or any(int(row[1]) > 8 * 1024 for _, _, row in rows)


HOLDER = re.compile(r"^\|.*\s(?:C|C\+G)\s.*?\b(\d{1,9})\s*MiB\s*\|")


def memory_gate(evidence: Evidence) -> Hit | None:
    """F30: too little is free for a start; MemAvailable decides."""
    memory = meminfo(evidence)
    total, free, available = (memory.get(key) for key in ("MemTotal", "MemFree", "MemAvailable"))
    if not total or free is None or available is None or engine_runs(evidence):
        return None
    need = int(total * UTILISATION)
    shown = f"meminfo: MemFree: {free} kB, MemAvailable: {available} kB"
    if available < need:
        return Hit(
            f"{available / 1024**2:.1f} GiB are available and a start at {UTILISATION} needs {need / 1024**2:.1f}.",
            shown,
        )
    if free < need:
        return Hit(
            f"{free / 1024**2:.1f} GiB are free, {available / 1024**2:.1f} available: the page cache holds the rest.",
            shown,
        )
    return None


FREE_MEMORY = re.compile(
    r"Free memory on device (?:\S+ )?\((\d+(?:\.\d+)?)/[\d.]+ GiB\) on startup is less than .*?(\d+(?:\.\d+)?) GiB\)"
)


def restart_race(evidence: Evidence) -> Hit | None:
    """F31: the start missed its memory by a hair: the last engine's had not come back yet."""
    for name, line, match in matching(evidence, LOGS, "on startup is less than", FREE_MEMORY):
        if float(match[1]) >= 0.99 * float(match[2]):
            return Hit("The engine before this start had not given all its memory back.", f"{name}: {line}")
    return None


def swap(evidence: Evidence) -> Hit | None:
    """F33: swap is on."""
    total = meminfo(evidence).get("SwapTotal", 0)
    if not total:
        return None
    return Hit(
        f"{total / 1024**2:.0f} GiB of swap are on: a full node stalls in it.",
        f"meminfo: SwapTotal: {total} kB",
        "warn",
    )


def explicit_bytes(evidence: Evidence) -> Hit | None:
    """F36: KV bytes were given, and what is left is too little."""
    available = meminfo(evidence).get("MemAvailable")
    if available is not None and available >= 4 * 1024**2:
        return None
    return said(
        "does not respect the gpu_memory_utilization", "The KV cache has a fixed size and ignores the utilisation."
    )(evidence)


def hang_at_init(evidence: Evidence) -> Hit | None:
    """F39: the log ends where two nodes meet."""
    last = evidence.last_line("engine.log")
    if "CustomAllreduce is disabled because this process group spans across nodes" not in last:
        return None
    return Hit("The engine's log ends where the two ranks meet: they wait for each other.", f"engine.log: {last}")


GPU_ROW = re.compile(r"\s(\d{1,4})W\s*/.*\|\s*(\d{1,3})%\s")


def idle_power(evidence: Evidence) -> Hit | None:
    """F39, F71: the GPU is busy and draws what an idle one draws."""
    for line in evidence.lines("nvidia-smi-table.txt", "%"):
        match = GPU_ROW.search(line)
        if match and int(match[2]) >= 90 and int(match[1]) <= 30:
            return Hit(
                f"The GPU is {match[2]} % busy at {match[1]} W: it spins in a deadlock, or its clock is stuck.",
                f"nvidia-smi-table.txt: {line}",
            )
    return None


def gpus(evidence: Evidence) -> list[list[str]]:
    """The rows of nvidia-smi.csv: name, memory, driver; without a heading."""
    lines = (evidence.text("nvidia-smi.csv") or "").splitlines()
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [row for row in rows if len(row) >= 3 and row[0].lower() != "name"]


def driver(evidence: Evidence) -> str:
    """The driver's version; "" when it is not known."""
    told = [row[2] for row in gpus(evidence) if re.match(r"^\d{3,}\.\d+", row[2])]
    table = re.search(r"Driver Version\s*:\s*(\d{3,}\.[\d.]+)", evidence.text("nvidia-smi-table.txt") or "")
    return next(iter([*told, *([table[1]] if table else [])]), "")


def driver_branch(evidence: Evidence) -> Hit | None:
    """F45: a driver outside the branch that GB10 is supported with."""
    version = driver(evidence)
    if not version or version.startswith("580."):
        return None
    return Hit(f"The driver is {version}, not of branch 580.", f"nvidia-smi: {version}")


NO_FIGURE = "nvidia-smi has no memory figure, as is normal on GB10: /proc/meminfo has it."


def no_memory_figure(evidence: Evidence) -> Hit | None:
    """F69: nvidia-smi shows no GPU, or no memory figure."""
    for name in ("nvidia-smi.csv", "nvidia-smi-table.txt"):
        line = next(evidence.lines(name, "No devices were found"), "")
        if line:
            return Hit("nvidia-smi finds no GPU.", f"{name}: {line}", "stop")
    for row in gpus(evidence):
        shown = f"nvidia-smi.csv: {', '.join(row)}"
        if row[0] in ("[N/A]", "N/A", "[Not Supported]"):
            return Hit("nvidia-smi does not tell the GPU's name.", shown, "warn")
        if row[1] in ("[N/A]", "N/A", "[Not Supported]", "Not Supported"):
            return Hit(NO_FIGURE, shown)
    row = next(evidence.lines("nvidia-smi-table.txt", "| Not Supported"), "")
    return Hit(NO_FIGURE, f"nvidia-smi-table.txt: {row}") if row and not gpus(evidence) else None


def release_file(evidence: Evidence) -> Hit | None:
    """F72: dgx-release holds a serial number, or several updates of which the last counts."""
    text = evidence.text("dgx-release") or ""
    serial = re.search(r"^DGX_SERIAL_NUMBER=[\"']?([^\"'\n]*)", text, re.MULTILINE)
    if serial and serial[1].strip() not in ("", "REDACTED"):
        return Hit("dgx-release holds a serial number.", "dgx-release: DGX_SERIAL_NUMBER=…")
    updates = re.findall(r"^DGX_OTA_VERSION=[\"']?([^\"'\s]+)", text, re.MULTILINE)
    if len(updates) > 1:
        return Hit(f"dgx-release lists {len(updates)} updates: {updates[-1]} is the one that counts.", "dgx-release")
    return None


def small_spark(evidence: Evidence) -> Hit | None:
    """F73: too little memory for this model."""
    total = meminfo(evidence).get("MemTotal")
    if not total or total >= SMALLEST_MEMORY:
        return None
    return Hit(
        f"This node has {total / 1024**2:.0f} GiB of memory: a rank needs a 128 GB Spark.", f"meminfo: {total} kB"
    )


def tuning(evidence: Evidence) -> Hit | None:
    """R1: the log ends in a tuning round at 0 %."""
    last = evidence.last_line("engine.log")
    if not re.search(r"(?i)tun(?:ing|er)\b.*\b0%", last):
        return None
    return Hit("The engine's log ends in FlashInfer's autotuner at 0 %.", f"engine.log: {last}")


def no_prefix_hits(evidence: Evidence) -> Hit | None:
    """R9: with speculation on, no prefix was ever found in the cache."""
    lines = [
        line for line in evidence.lines("engine.log", "Prefix cache hit rate:") if re.search(r"Running: [1-9]", line)
    ]
    rates = re.findall(r"Prefix cache hit rate: (\d+(?:\.\d+)?)%", "\n".join(lines))
    if len(rates) < 10 or any(float(rate) > 0 for rate in rates):
        return None
    if next(evidence.lines("engine.log", "SpecDecoding metrics"), None) is None:
        return None
    return Hit(
        f"No prefix was found in the cache in {len(rates)} reports, with speculation on.", f"engine.log: {lines[-1]}"
    )


def other_driver(nodes: list[Evidence]) -> Hit | None:
    """F45: drivers differ between nodes."""
    versions = {node.name: driver(node) for node in nodes if driver(node)}
    if len(set(versions.values())) < 2:
        return None
    return Hit(
        "The nodes have different GPU drivers.", ", ".join(f"{name}: {version}" for name, version in versions.items())
    )


def tuning_apart(nodes: list[Evidence]) -> Hit | None:
    """R1: one rank is in a tuning round and the other is not."""
    inside = [node for node in nodes if tuning(node)]
    outside = [node for node in nodes if node.last_line("engine.log") and not tuning(node)]
    if not inside or not outside:
        return None
    return Hit(
        f"{inside[0].name} waits in FlashInfer's autotuner and {outside[0].name} does not: they wait for each other.",
        f"{inside[0].name}: {inside[0].last_line('engine.log')}",
    )


def unequal_cache(nodes: list[Evidence]) -> Hit | None:
    """R10: the ranks have KV caches of different sizes."""
    sizes = {}
    for node in nodes:
        found = [match[1] for _, _, match in matching(node, ("engine.log",), "GPU KV cache size:", KV_SIZE)]
        if found:
            sizes[node.name] = found[-1]
    if len(set(sizes.values())) < 2:
        return None
    shown = ", ".join(f"{name}: {size} tokens" for name, size in sizes.items())
    return Hit("The ranks have KV caches of different sizes: the pool is as small as the smaller.", shown)


KV_SIZE = re.compile(r"GPU KV cache size: ([\d,]+) tokens")
