"""What a detector of `glm-vllm doctor` returns, and how lines of logs are looked for.

A detector looks for one fault in a node's evidence, or in that of all nodes. It returns a Hit, or None when the fault
is not there or the evidence does not tell: what is missing is never a fault. Ids, default severities and fixes stand in
findings.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from glm_vllm_overlay.node.evidence import Evidence

LOGS = ("engine.log", "nccl.log", "nccl-tests.txt", "journal.txt")


@dataclass
class Hit:
    """A fault that was found: one sentence, the line that shows it, and a severity where it differs from the table."""

    message: str
    evidence: str
    severity: str = ""


Detector = Callable[[Evidence], Hit | None]


def said(needle: str, message: str, pattern: str = "", files: tuple[str, ...] = LOGS) -> Detector:
    """A detector for a line that holds `needle` and matches `pattern`, whose groups `message` may use as {0}, {1}."""
    wanted = re.compile(pattern or re.escape(needle))

    def detect(evidence: Evidence) -> Hit | None:
        found = next(matching(evidence, files, needle, wanted), None)
        if found is None:
            return None
        name, line, match = found
        return Hit(message.format(*match.groups()), f"{name}: {line}")

    return detect


def first(*detectors: Detector) -> Detector:
    """A detector that asks others in turn."""

    def detect(evidence: Evidence) -> Hit | None:
        return next((hit for hit in (detector(evidence) for detector in detectors) if hit), None)

    return detect


def matching(
    evidence: Evidence, files: tuple[str, ...], needle: str, pattern: re.Pattern[str]
) -> Iterator[tuple[str, str, re.Match[str]]]:
    """(file, line, match) for the lines that hold `needle` and match `pattern`."""
    for name in files:
        for line in evidence.lines(name, needle):
            match = pattern.search(line)
            if match:
                yield name, line, match
