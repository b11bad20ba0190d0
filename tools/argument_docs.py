#!/usr/bin/env python3
"""Write each role's table of variables into its README.md, from meta/argument_specs.yml and defaults/main.yml.

tools/argument_docs.py            write
tools/argument_docs.py --check    write nothing; exit 1 and name what differs
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

BEGIN, END = "<!-- variables: made by `make docs` -->", "<!-- end of variables -->"
HEADER = "| Variable | Type | Default | Meaning |\n|---|---|---|---|\n"


class Mistake(Exception):
    """A role whose files contradict each other; the message is one sentence."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file would change")
    parser.add_argument("--roles", type=Path, default=Path(__file__).resolve().parents[1] / "roles")
    arguments = parser.parse_args()
    failed = False
    for spec in sorted(arguments.roles.glob("*/meta/argument_specs.yml")):
        role = spec.parents[1]
        readme = role / "README.md"
        try:
            old = readme.read_text(encoding="utf-8") if readme.exists() else f"# {role.name}\n\n{BEGIN}\n{END}\n"
            new = rewritten(old, table(role), readme)
        except Mistake as mistake:
            print(mistake, file=sys.stderr)
            failed = True
            continue
        if new == old and readme.exists():
            continue
        if arguments.check:
            print(f"{readme} is out of date: run make docs.", file=sys.stderr)
            failed = True
        else:
            readme.write_text(new, encoding="utf-8")
    return int(failed)


def table(role: Path) -> str:
    """The Markdown table of the role in folder ``role``."""
    options = read(role / "meta/argument_specs.yml")["argument_specs"]["main"].get("options", {})
    defaults = read(role / "defaults/main.yml")
    for name in sorted(options.keys() | defaults.keys()):
        if name not in options:
            raise Mistake(
                f"{name} stands in defaults/main.yml and not in meta/argument_specs.yml of {role.name}: describe it."
            )
        real = defaults.get(name)
        said = options[name].setdefault("default", real)
        if name in defaults and "{{" not in str(real) and said != real:
            raise Mistake(
                f"{name} of {role.name} defaults to {real!r}, and its argument_specs says {said!r}: make them equal."
            )
    return HEADER + "".join(rows(options))


def rows(options: Mapping[str, Mapping[str, Any]], above: str = "") -> Iterator[str]:
    for name, option in options.items():
        kind = option.get("type", "str")
        if kind == "list" and "elements" in option:
            kind = f"list of {option['elements']}"
        if "choices" in option:
            kind = " \\| ".join(f"`{choice}`" for choice in option["choices"])
        kind = "any" if kind == "raw" else kind
        default = (
            f"`{json.dumps(option['default'])}`"
            if "default" in option
            else "required"
            if option.get("required")
            else ""
        )
        yield f"| `{above}{name}` | {kind} | {default} | {prose(option.get('description', ''))} |\n"
        yield from rows(option.get("options", {}), f"{above}{name}{'[]' if option.get('type') == 'list' else ''}.")


def prose(description: str | list[str]) -> str:
    """Ansible's markup in one line of Markdown."""
    text = description if isinstance(description, str) else " ".join(description)
    text = re.sub(r"\b[CVOE]\(([^)]*)\)", lambda found: "`" + found[1].strip('"') + "`", text)
    text = re.sub(r"\b[BI]\(([^)]*)\)", r"**\1**", text)
    return " ".join(text.split()).replace("|", "\\|")


def rewritten(text: str, body: str, file: Path) -> str:
    """``text`` with ``body`` between the markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise Mistake(
            f"{file} needs the lines '{BEGIN}' and '{END}' once each: the table of variables goes between them."
        )
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{body}{END}{rest.split(END)[1]}"


def read(file: Path) -> dict[str, Any]:
    return (yaml.safe_load(file.read_text(encoding="utf-8")) or {}) if file.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
