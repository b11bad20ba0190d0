"""`glm-vllm guard`: ends the engine before this node's memory runs out, and keeps who used it.

On unified memory the kernel does not kill what takes too much: the driver fails to allocate and the machine stands
still. The guard looks several times a second, runs as the engine's own user, and asks systemd only once something is
wrong. It ends the engine's start and nothing else; the gate decides when the next one may begin.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node import state, units
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.files import read_line, write_atomically
from glm_vllm_overlay.node.notify import notify
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.settings import Node

# A burst of allocations was seen to take 850 MiB in a second.
TICK = 0.2
WATCHDOG_TICK = 2.0
# The pressure of a moment is no reason to end anything.
PRESSURE_SECONDS = 5.0
JOURNAL_PATIENCE = 60.0
SHOWN, KEPT = 3, 10
GIB = 1024**3
PAGE = os.sysconf("SC_PAGE_SIZE")
# The driver could not allocate. While an engine loads it says so without harm.
DRIVER = re.compile(r"NVRM: .*(NV_ERR_NO_MEMORY|0x00000051)")
JOURNAL = ("journalctl", "--dmesg", "--follow", "--lines=0", "--output=cat", "--no-pager")


@dataclass(frozen=True)
class Limits:
    """Bytes of MemAvailable that are worth a warning (`reserve`) and an end (`floor`); per cent of stalled time."""

    reserve: int
    floor: int
    pressure: float

    @classmethod
    def parse(cls, environment: Mapping[str, str]) -> Limits:
        """Read the unit's variables; raises Unusable naming the one at fault."""
        try:
            name = "GLM_RESERVE_BYTES"
            reserve = int(environment[name])
            name = "GLM_GUARD_BYTES"
            floor = int(environment[name])
            name = "GLM_GUARD_PRESSURE"
            return cls(reserve, floor, float(environment[name]))
        except (KeyError, ValueError):
            raise Unusable(f"{name} is missing or no number in this unit's environment: run site.yml") from None


def stalled(path: str) -> float:
    """Per cent of the last ten seconds in which every process waited for memory; 0 where the kernel does not tell."""
    match = re.search(r"^full avg10=([\d.]+)", read_line(Path(path)), re.MULTILINE)
    return float(match.group(1)) if match else 0.0


def processes(proc: Path) -> list[dict]:
    """Every process with its resident bytes, largest first: `{"pid", "name", "user", "rss"}`."""
    found = []
    for entry in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            rss = int((entry / "statm").read_text().split()[1]) * PAGE
            name = (entry / "comm").read_text().strip()
            found.append({"pid": int(entry.name), "name": name, "user": user(entry.stat().st_uid), "rss": rss})
    return sorted(found, key=lambda process: -process["rss"])


def user(uid: int) -> str:
    """The name of a user, or its number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def record(paths: Paths, node: Node, cause: str, engine: dict[str, str], lines: list[str]) -> dict:
    """Who used what, now: the document that is kept, and its one sentence (`what`)."""
    memory, all_processes = state.memory(node.meminfo), processes(paths.proc)
    elsewhere = max(0, memory["total"] - memory["available"] - sum(process["rss"] for process in all_processes))
    largest = ", ".join(f"{process['name']} {process['rss'] / GIB:.1f}" for process in all_processes[:SHOWN])
    return {
        "schema": 1,
        "when": state.now(),
        "invocation_id": engine.get("InvocationID", ""),
        "cause": cause,
        "what": f"the memory guard ended the engine: {cause}; in GiB: {largest}, GPU and kernel {elsewhere / GIB:.1f}",
        "memory": memory,
        "elsewhere": elsewhere,
        "processes": all_processes[:KEPT],
        "kernel": lines,
    }


@dataclass
class Guard:
    """What the guard remembers from one look to the next."""

    paths: Paths
    node: Node
    limits: Limits
    pressure_file: str
    kernel: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    driver_failed: str = ""
    pressed_since: float | None = None
    warned: bool = False
    asked: str = ""

    def hear(self, line: str) -> None:
        """Take in a line of the kernel's journal."""
        if "NVRM" in line:
            self.kernel.append(line)
        if DRIVER.search(line):
            self.driver_failed = line

    def look(self, clock: float) -> None:
        """Look once, at `clock` (monotonic seconds), and act."""
        available = state.memory(self.node.meminfo)["available"]
        self.warn(available)
        if available < self.limits.floor:
            has, floor = available / GIB, self.limits.floor / GIB
            self.end(f"{has:.2f} GiB are available, less than {floor:.2f}", now=available < self.limits.floor / 2)
        if pressed := self.pressed(clock):
            self.end(pressed, serving_only=True)
        if self.driver_failed:
            line, self.driver_failed = self.driver_failed, ""
            self.end(f"the driver cannot allocate ({line})", serving_only=True)

    def pressed(self, clock: float) -> str:
        """Why the pressure is too high for too long, or ""."""
        share = stalled(self.pressure_file)
        if share < self.limits.pressure:
            self.pressed_since = None
            return ""
        self.pressed_since = clock if self.pressed_since is None else self.pressed_since
        if clock - self.pressed_since < PRESSURE_SECONDS:
            return ""
        return f"everything waited for memory for {share:.0f} % of the last 10 s"

    def warn(self, available: int) -> None:
        """Say once that less than the reserve is left, and once that it is back."""
        if not self.warned and available < self.limits.reserve:
            self.warned = True
            top = ", ".join(f"{each['name']} {each['rss'] / GIB:.1f}" for each in processes(self.paths.proc)[:SHOWN])
            has, wanted = available / GIB, self.limits.reserve / GIB
            print(f"{has:.1f} GiB are available, less than the reserve of {wanted:.1f}; largest: {top}", flush=True)
        elif self.warned and available > 1.1 * self.limits.reserve:
            self.warned = False
            print(f"{available / GIB:.1f} GiB are available again", flush=True)

    def end(self, cause: str, *, now: bool = False, serving_only: bool = False) -> None:
        """Ask the engine's start to end, once, and keep the record; with `now` kill what holds the memory."""
        shown = units.show(*{self.node.unit, self.node.gate_unit})
        engine, gate = shown[self.node.unit], shown[self.node.gate_unit]
        main = int(engine.get("MainPID") or 0)
        if not main or (serving_only and state.phase(engine, gate) != "serving"):
            return
        if self.asked != engine.get("InvocationID", ""):
            self.asked = engine.get("InvocationID", "")
            document = record(self.paths, self.node, cause, engine, list(self.kernel))
            keep(self.paths, document)
            print(json.dumps(document), flush=True)
            send(signal.SIGTERM, {main})
        if now:
            # The main process stays: it says why the engine ended.
            send(signal.SIGKILL, state.descendants(state.main_pids(engine, gate), self.paths.proc) - {main})


def keep(paths: Paths, document: dict) -> None:
    """Write the record; the journal has it where the disk is full."""
    try:
        write_atomically(paths.memory_record, json.dumps(document) + "\n")
    except OSError as error:
        print(f"{paths.memory_record} cannot be written: {error}", flush=True)


def send(number: signal.Signals, pids: set[int]) -> None:
    """Signal processes that may have ended meanwhile."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def follow_kernel(guard: Guard, stop: threading.Event) -> None:
    """Hand the guard every new line of the kernel's journal, for as long as the process lives."""
    while not stop.is_set():
        try:
            with subprocess.Popen(JOURNAL, stdout=subprocess.PIPE, text=True, errors="replace") as journal:
                for line in journal.stdout:
                    guard.hear(line.strip())
            problem = f"exit code {journal.returncode}"
        except OSError as error:
            problem = error.strerror
        print(
            f"the kernel's journal cannot be followed ({problem}); tried again in {JOURNAL_PATIENCE:.0f} s", flush=True
        )
        stop.wait(JOURNAL_PATIENCE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm guard` has no arguments of its own: its unit's environment says it all."""


def run(args: argparse.Namespace) -> int:
    """`glm-vllm guard`: runs until it is stopped."""
    paths = node_paths.current()
    node = Node.load(paths)
    limits = Limits.parse(os.environ)
    guard = Guard(paths, node, limits, os.environ.get("GLM_PRESSURE") or str(paths.proc / "pressure/memory"))
    state.memory(node.meminfo)  # unusable at the start: say so at once
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    threading.Thread(target=follow_kernel, args=(guard, stop), daemon=True).start()
    notify("READY=1", f"STATUS=ends the engine below {limits.floor / GIB:.2f} GiB available")
    alive = time.monotonic()
    complaint = ""
    while not stop.wait(TICK):
        try:
            guard.look(time.monotonic())
            said = ""
        except Unusable as error:
            said = str(error)
        if said and said != complaint:
            print(said, flush=True)
        complaint = said
        if time.monotonic() - alive >= WATCHDOG_TICK:
            alive = time.monotonic()
            notify("WATCHDOG=1")
    notify("STOPPING=1")
    return 0
