#!/usr/bin/env python3
"""Write the table of what `glm-vllm doctor` finds into docs/network.md, from the code that finds it.

tools/finding_docs.py            write
tools/finding_docs.py --check    write nothing; exit 1 when the page is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "files/overlay/src"))

from glm_vllm_overlay.node import findings  # noqa: E402 - the path has to be set first

BEGIN, END = "<!-- findings: made by `make docs` -->", "<!-- end of findings -->"
HEADER = "| id | severity | what it means | what to do |\n|---|---|---|---|\n"


def table() -> str:
    """The Markdown table of all ids."""
    return HEADER + "".join(row(kind) for kind in findings.TABLE)


def row(kind: findings.Kind) -> str:
    """One id; a severity in parentheses is what the fault would be, had a bundle shown it."""
    severity = kind.severity
    if kind.when:
        severity = kind.when if kind.when.startswith(kind.severity) else f"{kind.severity}; {kind.when}"
    meaning = kind.title if kind.detectable else f"{kind.title}. Not detectable from a bundle: {kind.unseen}"
    cells = (kind.id, severity if kind.detectable else f"({severity})", meaning, kind.fix)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def rewritten(text: str) -> str:
    """The page with the table between its markers; raises ValueError when they are not there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"the page needs the lines '{BEGIN}' and '{END}' once each: the table goes between them")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.split(END)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page would change")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs/network.md")
    arguments = parser.parse_args()
    old = arguments.page.read_text(encoding="utf-8")
    try:
        new = rewritten(old)
    except ValueError as error:
        print(f"{arguments.page}: {error}.", file=sys.stderr)
        return 1
    if new != old and arguments.check:
        print(f"{arguments.page} is out of date: run make docs.", file=sys.stderr)
        return 1
    if new != old:
        arguments.page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
