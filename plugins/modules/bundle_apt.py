# SPDX-License-Identifier: Apache-2.0
"""Collect packages of apt with everything that they depend on, for another machine than this one."""

from __future__ import annotations

DOCUMENTATION = r"""
module: bundle_apt
short_description: Makes a folder of packages with all they depend on, and its index
description:
  - Runs on the controller, which needs C(apt-get) but neither root nor the nodes' processor. The packages of this
    machine play no part, so the folder is complete whatever a node has.
options:
  dest: {description: Folder of the packages., type: path, required: true}
  packages: {description: Names., type: list, elements: str, required: true}
  architecture: {description: "Of the nodes, as C(dpkg --print-architecture) prints it.", type: str, required: true}
  sources:
    description: A C(.list) or C(.sources) file of the nodes' distribution. Empty takes this machine's own sources.
    type: str
    default: ""
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Collect the packages
  bundle_apt: {dest: /srv/bundle/apt, packages: [rsync], architecture: arm64, sources: /srv/ubuntu.sources}
"""

RETURN = r"""
files: {description: Packages of the folder., type: list, elements: str, returned: always}
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

INDEX = "Packages"


def configuration(work: Path, architecture: str, sources: str) -> str:
    """apt's configuration for a machine of its own that has nothing installed."""
    lines = [
        f'Dir::State "{work}/state";',
        f'Dir::State::status "{work}/status";',
        f'Dir::Cache "{work}/cache";',
        f'APT::Architecture "{architecture}";',
        "#clear APT::Architectures;",
        f'APT::Architectures {{ "{architecture}"; }};',
        'APT::Install-Recommends "false";',
        'APT::Sandbox::User "";',
        'Acquire::Languages "none";',
        'Debug::NoLocking "true";',
    ]
    if sources:
        lines += ['Dir::Etc::sourcelist "/dev/null";', f'Dir::Etc::sourceparts "{work}/parts";']
    return "\n".join(lines) + "\n"


def file_name(fields: dict[str, str]) -> str:
    """How apt calls the file of a package that it has downloaded."""
    return f"{fields['Package']}_{fields['Version'].replace(':', '%3a')}_{fields['Architecture']}.deb"


def entries(stanzas: str) -> dict[str, str]:
    """What apt shows of packages, by the name of the file: an index of a folder that holds them."""
    found = {}
    for stanza in re.split(r"\n{2,}", stanzas.strip()):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[A-Za-z0-9-]+: ", line))
        name = file_name(fields)
        found[name] = re.sub(r"(?m)^Filename: .*$", f"Filename: ./{name}", stanza)
    return dict(sorted(found.items()))


class Apt:
    """apt-get in a folder of its own."""

    def __init__(self, module: AnsibleModule, work: Path) -> None:
        self.module, self.archives = module, work / "cache/archives"
        self.chosen: list[str] = []
        for folder in ("state/lists/partial", "cache/archives/partial", "parts"):
            (work / folder).mkdir(parents=True)
        (work / "status").touch()
        if sources := module.params["sources"]:
            shutil.copy(sources, work / "parts" / f"nodes{Path(sources).suffix}")
        (work / "apt.conf").write_text(configuration(work, module.params["architecture"], sources))
        self.environment = {"APT_CONFIG": str(work / "apt.conf"), "LC_ALL": "C.UTF-8"}

    def ask(self, *command: str) -> str:
        """Standard output of a command; ends the module with apt's own first complaint."""
        code, out, said = self.module.run_command(
            list(command), environ_update=self.environment, cwd=str(self.archives)
        )
        complaints = [line for line in (said + out).splitlines() if line.startswith(("E: ", "W: Failed to fetch"))]
        if code or complaints:
            self.module.fail_json(
                msg=f"apt cannot bring the nodes' packages, {(complaints or [said.strip()])[0]}: correct "
                "bundle_apt_sources, a file with the sources of the nodes' distribution, and have its keyring here."
            )
        return out

    def plan(self, packages: list[str]) -> dict[str, str]:
        """The packages with all that they need, as `entries`."""
        self.ask("apt-get", "-q", "update")
        out = self.ask("apt-get", "-q", "-y", "--simulate", "install", *packages)
        self.chosen = [f"{name}={version}" for name, version in re.findall(r"(?m)^Inst (\S+) \((\S+) ", out)]
        return entries(self.ask("apt-cache", "show", *self.chosen))

    def bring(self, here: set[Path]) -> None:
        """Download what was planned; what is `here` already is only held against its hash."""
        for file in here:
            shutil.copy(file, self.archives)
        self.ask("apt-get", "-q", "download", *self.chosen)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "dest": {"type": "path", "required": True},
            "packages": {"type": "list", "elements": "str", "required": True},
            "architecture": {"type": "str", "required": True},
            "sources": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    dest, sources = Path(module.params["dest"]), module.params["sources"]
    if not shutil.which("apt-get"):
        module.fail_json(msg="This machine has no apt-get: make the bundle on a Debian or Ubuntu machine.")
    if sources and Path(sources).suffix not in (".list", ".sources"):
        module.fail_json(msg=f"bundle_apt_sources is {sources}: apt reads files that end with .list or .sources.")
    if sources and not Path(sources).is_file():
        module.fail_json(msg=f"bundle_apt_sources names {sources}, which is no file: correct the path.")
    names = module.params["packages"]
    before = {path.name for path in dest.glob("*.deb")}
    with tempfile.TemporaryDirectory() as folder:
        apt = Apt(module, Path(folder))
        planned = apt.plan(names)
        text = "\n\n".join(planned.values()) + "\n"
        changed = before != set(planned) or not (dest / INDEX).exists() or (dest / INDEX).read_text() != text
        if changed and not module.check_mode:
            apt.bring({dest / name for name in before & set(planned)})
            dest.mkdir(parents=True, exist_ok=True)
            for name in before - set(planned):
                (dest / name).unlink()
            for name in set(planned) - before:
                shutil.copy(apt.archives / name, dest)
            new = dest / f".{INDEX}"
            new.write_text(text)
            os.replace(new, dest / INDEX)
        module.exit_json(changed=changed, files=list(planned))


if __name__ == "__main__":
    main()
