"""What stands on a node's disk, and what a run with --check foretold of it. Things are named `<kind> <name>`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

import bed
from pair import Run

# Where the roles put things. Everything else on a disk is packages', logs or caches.
ROOTS = ("/etc", "/opt", "/usr/local", "/var/lib/glm-vllm", "/var/cache/glm-vllm")
# Folders of ours that are filled one thing at a time: that the folder is foretold says nothing of what is in it.
SHARED = ("/", *ROOTS, "/etc/glm-vllm", "/opt/glm-vllm", "/var/lib/glm-vllm/deployments")
LIST = """
find "$@" -xdev \\( -name venv -prune -o -true \\) -printf 'path %p\\n' 2>/dev/null
cut -d: -f1 /etc/passwd | sed 's/^/user /'
cut -d: -f1 /etc/group | sed 's/^/group /'
dpkg-query -W -f '${db:Status-Status} ${Package}\\n' | sed -n 's/^installed /package /p'
echo --
cat /var/lib/dpkg/info/*.list
"""
KINDS = ("path", "user", "group", "package")
NEW_PACKAGES = re.compile(r"^The following NEW packages will be installed:\n((?: .*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Disk:
    """Paths below ROOTS, users, groups and packages; which paths packages own."""

    things: frozenset[str]
    owned: frozenset[str]

    def created_since(self, before: Disk) -> set[str]:
        """What is new and came from no package."""
        return {thing for thing in self.things - before.things if thing.removeprefix("path ") not in self.owned}


def read(node: str) -> Disk:
    """The disk of a node as it is."""
    things, _, owned = bed.on(node, "sh", "-c", LIST, "list", *ROOTS, timeout=120).partition("--\n")
    return Disk(frozenset(things.splitlines()), frozenset(owned.splitlines()))


def foretold(run: Run, host: str) -> set[str]:
    """What a run with --check says that it would create on a host."""
    found: set[str] = set()
    for where, _, module, result in run.results("runner_on_ok", "runner_item_on_ok"):
        if where != host or not result.get("changed"):
            continue
        found |= {f"path {result[key]}" for key in ("path", "dest") if result.get(key)}
        diffs = result.get("diff") or []
        headers = [diff.get("after_header", "") for diff in (diffs if isinstance(diffs, list) else [diffs])]
        found |= {f"path {header}" for header in headers if header.startswith(tuple(f"{root}/" for root in ROOTS))}
        for record in result.get("records", []):
            kind = "path" if record["kind"] in ("file", "dir", "symlink") else record["kind"]
            if not record["before"].get("exists") and not record["before"].get("installed"):
                found.add(f"{kind} {record['name']}")
                if kind == "user":
                    found.add(f"group {record['name']}")
        if module.endswith(".apt"):
            found |= {f"package {name}" for block in NEW_PACKAGES.findall(result["stdout"]) for name in block.split()}
    return found


def covered(thing: str, by: set[str]) -> bool:
    """Whether a thing is foretold, as it stands or with the folder that it lies in."""
    kind, _, name = thing.partition(" ")
    parents = PurePosixPath(name).parents if kind == "path" else ()
    return thing in by or any(f"path {parent}" in by for parent in parents if str(parent) not in SHARED)
