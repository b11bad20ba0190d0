"""Detectors that read ib_write_bw, nccl-tests and /proc/meminfo."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from glm_vllm_overlay.node.evidence import Evidence
from glm_vllm_overlay.node.hits import Detector, Hit, said

GIB = 1024**3
# Gb/s a rail, as cx7_network_min_gbps; the trap leaves 8 to 25.
FLOOR, TRAP = 80.0, 30.0
# Below 64 KiB a message is too small to fill a rail.
JUDGED_BYTES = 65536
# GB/s of bus bandwidth at a size that fills both rails: two give about 22, one about 11, TCP less than 1.
JUDGED_COLLECTIVE = 1024**3
TCP_BUSBW, SICK_BUSBW, ONE_RAIL_BUSBW = 1.0, 9.0, 15.0
# Several detectors ask for the same result, out of a file that may hold hundreds of thousands of lines.
once = functools.lru_cache(maxsize=4)


@dataclass
class Measured:
    """One ib_write_bw result: the device ("" when not printed), Gb/s on average, and the row."""

    device: str
    gbps: float
    row: str


HEADER = re.compile(r"#bytes\s+#iterations.*BW average\[(\w+)/sec\]")
ROW = re.compile(r"^\s*(\d{1,15})\s+(\d+)\s+(?:[\d.]+|-?nan|inf)\s+(\d+(?:\.\d+)?)(?:\s+[\d.]+)?\s*$")


def rows_of(text: str) -> Iterator[tuple[int, int, Measured]]:
    """(table, message size in bytes, result) for each numeric row of ib_write_bw's output."""
    table, device, unit = 0, "", 1.0
    for line in text.splitlines():
        named, header, row = re.match(r"\s*Device\s*:\s*(\S+)", line), HEADER.search(line), ROW.match(line)
        if named:
            device = named[1]
        elif header:
            # Without --report_gbits it prints MiB, and calls them MB in old versions.
            table, unit = table + 1, 1.0 if header[1] == "Gb" else 8 * 1024**2 / 1e9
        elif row:
            yield table, int(row[1]), Measured(device, float(row[3]) * unit, line.strip())


@once
def measured(evidence: Evidence) -> list[Measured]:
    """The ib_write_bw results that say something about a rail: large messages, of a sweep the best row."""
    tables: dict[int, list[tuple[int, Measured]]] = {}
    for table, size, result in rows_of(evidence.text("ib_write_bw.txt") or ""):
        if size >= JUDGED_BYTES:
            tables.setdefault(table, []).append((size, result))
    found: list[Measured] = []
    for rows in tables.values():
        sweep = len({size for size, _ in rows}) > 1
        found += [max((row for _, row in rows), key=lambda row: row.gbps)] if sweep else [row for _, row in rows]
    return found


def slow_rail(evidence: Evidence) -> Hit | None:
    """F01: a measurement below the floor."""
    worst = min(measured(evidence), key=lambda result: result.gbps, default=None)
    if worst is None or worst.gbps >= FLOOR:
        return None
    what = "the port is wedged (the 13 Gb/s trap)" if worst.gbps < TRAP else f"below the floor of {FLOOR:.0f}"
    return Hit(f"{worst.device or 'A rail'} carries {worst.gbps:.1f} Gb/s: {what}.", f"ib_write_bw.txt: {worst.row}")


def silent_wedge(evidence: Evidence) -> Hit | None:
    """F01: the adapter's own controller has stopped answering, unless a measurement says that all is well."""
    results = measured(evidence)
    if results and min(result.gbps for result in results) >= FLOOR:
        return None
    return said("irisc not responding", "The adapter's own controller does not answer: the port is wedged.")(evidence)


BUSBW_ROW = re.compile(
    r"^\s*(\d{1,15})\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+(\d+(?:\.\d+)?)\s", re.MULTILINE
)


@once
def collective(evidence: Evidence) -> tuple[float, str] | None:
    """(GB/s of bus bandwidth, line) of nccl-tests at a size that fills the rails; None when there is no such result."""
    text = evidence.text("nccl-tests.txt") or ""
    if worlds_of_one(evidence):
        return None
    rows = [(int(match[1]), float(match[2]), match[0].strip()) for match in BUSBW_ROW.finditer(text + "\n")]
    large = [(busbw, line) for size, busbw, line in rows if size >= JUDGED_COLLECTIVE]
    if rows:
        return max(large, default=None)
    average = re.search(r"^#\s*Avg bus bandwidth\s*:\s*(\d+(?:\.\d+)?)", text, re.MULTILINE)
    return (float(average[1]), average[0]) if average else None


def busbw(low: float, high: float, message: str) -> Detector:
    """A detector for a collective whose bus bandwidth lies in [low, high) GB/s."""

    def detect(evidence: Evidence) -> Hit | None:
        result = collective(evidence)
        if result is None or not low <= result[0] < high:
            return None
        return Hit(message.format(result[0]), f"nccl-tests.txt: {result[1]}")

    return detect


def no_row(evidence: Evidence) -> Hit | None:
    """F08: ib_write_bw printed something, and no result."""
    text = evidence.text("ib_write_bw.txt") or ""
    if next(rows_of(text), None) or not re.search(r"#bytes|RDMA_Write|ib_write_bw|GID index|Couldn't|[Ff]ailed", text):
        return None
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip(" -=\t")), "")
    return Hit("ib_write_bw measured nothing: no row of numbers follows its heading.", f"ib_write_bw.txt: {last}")


@once
def worlds_of_one(evidence: Evidence) -> Hit | None:
    """F28: nccl-tests ran as one-rank worlds, which measures nothing."""
    text = evidence.text("nccl-tests.txt") or ""
    ranks = set(re.findall(r"\bRank\s+(\d+)\b", text))
    alone = ranks == {"0"} or (not ranks and bool(re.search(r"\bnGpus 1\b", text)))
    zero = re.search(r"^#\s*Avg bus bandwidth\s*:\s*0+(?:\.0*)?\s*$", text, re.MULTILINE)
    if not (alone and re.search(r"\bnGpus 1\b|busbw|bus bandwidth", text)) and not zero:
        return None
    line = zero[0] if zero else next((line for line in text.splitlines() if "Rank" in line or "nGpus" in line), "")
    return Hit(
        "nccl-tests ran without MPI, each rank alone: the result says nothing.", f"nccl-tests.txt: {line.strip()}"
    )


def huge_collective(evidence: Evidence) -> Hit | None:
    """F29: a 16 GB collective was begun with too little memory and did not end."""
    text = evidence.text("nccl-tests.txt") or ""
    size = re.search(r"maxBytes (\d{1,15})\b", text)
    available = meminfo(evidence).get("MemAvailable")
    if not size or int(size[1]) < 8 * GIB or available is None or available >= 48 * 1024**2:
        return None
    if "Avg bus bandwidth" in text or BUSBW_ROW.search(text + "\n"):
        return None
    begun = int(size[1]) // 10**9
    return Hit(
        f"nccl-tests of {begun} GB was begun with {available // 1024**2} GiB available and did not end.",
        f"nccl-tests.txt: {size[0]}",
    )


def meminfo(evidence: Evidence) -> dict[str, int]:
    """The figures of /proc/meminfo in kB; {} when there are none."""
    text = evidence.text("meminfo") or ""
    return {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d{1,15}) kB\s*$", text, re.MULTILINE)}
