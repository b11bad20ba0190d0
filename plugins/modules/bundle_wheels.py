# SPDX-License-Identifier: Apache-2.0
"""Collect the wheels that locks name for another machine than this one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_wheels
short_description: Collects the wheels of locks, every hash checked
description:
  - Runs on the controller. C(pip download) brings what is missing, from wherever pip's own configuration says, and what
    the locks name no longer is removed.
options:
  dest: {description: Folder of the wheels., type: path, required: true}
  locks: {description: Files with requirements and hashes., type: list, elements: path, required: true}
  python: {description: "Python of the nodes, as C(3.12).", type: str, required: true}
  machine: {description: "Their processor, as C(uname -m) prints it.", type: str, required: true}
  glibc: {description: Minor version of their glibc 2., type: int, required: true}
  find_links: {description: Folders of wheels to take from as well., type: list, elements: path, default: []}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Collect the wheels
  bundle_wheels: {dest: /srv/bundle/wheels, locks: [files/locks/uv.txt], python: "3.12", machine: aarch64, glibc: 39}
"""

RETURN = r"""
added: {description: Wheels that came., type: list, elements: str, returned: not in check mode}
removed: {description: Wheels that went., type: list, elements: str, returned: not in check mode}
"""

import re
import sys
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

OLDEST_GLIBC = 5  # of the tags that wheels still carry
NAME = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def platforms(machine: str, glibc: int) -> list[str]:
    """Platform tags of wheels that such a machine takes, as options of pip."""
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc, OLDEST_GLIBC - 1, -1)]
    tags += [f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")] + [f"linux_{machine}"]
    return [f"--platform={tag}" for tag in tags]


def canonical(name: str) -> str:
    """A package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named(locks: list[Path]) -> set[tuple[str, str]]:
    """(name, version) of what the locks hold; the version without its local part, which a file name escapes."""
    found = (pair for lock in locks for pair in NAME.findall(lock.read_text()))
    return {(canonical(name), version.partition("+")[0]) for name, version in found}


def stray(folder: Path, wanted: set[tuple[str, str]]) -> list[Path]:
    """Wheels that no lock names."""
    parts = {wheel: wheel.name.split("-") for wheel in sorted(folder.glob("*.whl"))}
    return [w for w, p in parts.items() if (canonical(p[0]), p[1].partition("+")[0].partition("%2B")[0]) not in wanted]


def command(params: dict[str, object]) -> list[str]:
    """The command that brings what is missing."""
    version = str(params["python"]).replace(".", "")
    return [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes",
        f"--python-version={params['python']}", "--implementation=cp", f"--abi=cp{version}", "--abi=abi3", "--abi=none",
        *platforms(str(params["machine"]), int(str(params["glibc"]))),
        *(f"--find-links={folder}" for folder in [params["dest"], *params["find_links"]]),  # type: ignore[misc]
        *(f"--requirement={lock}" for lock in params["locks"]),  # type: ignore[attr-defined]
        f"--dest={params['dest']}",
    ]  # fmt: skip


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            "locks": {"type": "list", "elements": "path", "required": True},
            "python": {"type": "str", "required": True},
            "machine": {"type": "str", "required": True},
            "glibc": {"type": "int", "required": True},
            "find_links": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    folder, locks = Path(module.params["dest"]), [Path(lock) for lock in module.params["locks"]]
    wanted = named(locks)
    before = {wheel.name for wheel in folder.glob("*.whl")}
    old = stray(folder, wanted)
    if module.check_mode:
        module.exit_json(changed=bool(old) or len(before) - len(old) < len(wanted))
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in old:
        wheel.unlink()
    code, _, said = module.run_command(command(module.params))
    if code:
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "no word")
        module.fail_json(
            msg=f"pip cannot bring the wheels, {last.removeprefix('ERROR: ')}: see what pip is set up for here."
        )
    after = {wheel.name for wheel in folder.glob("*.whl")}
    module.exit_json(changed=before != after, added=sorted(after - before), removed=sorted(before - after))


if __name__ == "__main__":
    main()
