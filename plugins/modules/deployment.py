#!/usr/bin/python
"""Stage and promote deployments: what a node serves, as one folder that is swapped in and out whole."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: deployment
short_description: Stage and promote what a node serves
description:
  - A deployment is a folder below C(/var/lib/glm-vllm/deployments) that holds deployment.json, the engine's files
    (serve.yaml, node.env, a chat template) and the rendered systemd units. C(current) and C(previous) are symlinks to
    two of them; C(/etc/glm-vllm) holds a link to each file of C(current).
  - C(state=planned) compares the wanted content with C(current) and says which number a new deployment would get.
  - C(state=staged) writes the folder; nothing that runs is touched.
  - C(state=promoted) makes it C(current), installs its units and the links that name it, and removes units and links
    that only the former deployment had. Then it removes the oldest deployments beyond C(keep), never C(current) or
    C(previous), and the releases with their caches that no deployment names any more and no process runs from.
options:
  state:
    description: What to do.
    choices: [planned, staged, promoted]
    required: true
    type: str
  number:
    description: Number of the deployment; the same on every node.
    type: int
  files:
    description: File name to content, serve.yaml among them.
    type: dict
    default: {}
  units:
    description: Unit file name to content.
    type: dict
    default: {}
  facts:
    description: What deployment.json says beside number, time and hashes - release, model, drafter, executor.
    type: dict
    default: {}
  why:
    description: One line, kept in deployment.json.
    type: str
    default: site.yml
  keep:
    description: How many deployments to keep beside current and previous.
    type: int
    default: 3
  root:
    description: Prefix of every path, for tests.
    type: str
    default: ""
author: GLM-5.3-Flash on two Sparks
"""

EXAMPLES = r"""
- name: Plan
  deployment:
    state: planned
    files: {serve.yaml: "{{ text }}", node.env: "{{ variables }}"}
    units: {"glm-vllm-head.service": "{{ unit }}"}
    facts: {release: abc, model: {name: m, revision: r, path: /p}, drafter: null, executor: mp}
  register: plan
"""

RETURN = r"""
number:
  description: For planned, the next free number on this node; otherwise the number acted on.
  type: int
  returned: always
current:
  description: Number of the current deployment, null when there is none.
  type: int
  returned: planned
differs:
  description: Whether the wanted content differs from what is current.
  type: bool
  returned: planned
removed:
  description: Paths of old deployments, releases and caches that were removed.
  type: list
  returned: promoted
"""

import datetime
import glob
import hashlib
import json
import os
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule

DEPLOYMENTS = "/var/lib/glm-vllm/deployments"
UNITS = "/etc/systemd/system"
FILES = "/etc/glm-vllm"
RELEASES = "/opt/glm-vllm/releases"
CACHES = "/var/cache/glm-vllm"
COMMAND = "/usr/local/bin/glm-vllm"
RECORD = "deployment.json"


def read(path):
    """Text of a file, or None when there is none."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def write(path, text, mode=0o644):
    """Replace a file at once: readers see the old text or the new, never a part."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    handle, name = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".new-")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.chmod(name, mode)
    os.replace(name, path)


def link(path, target):
    """Point a symlink at target in one rename; returns whether it changed."""
    if os.path.islink(path) and os.readlink(path) == target:
        return False
    os.makedirs(os.path.dirname(path), exist_ok=True)
    new = path + ".new"
    if os.path.lexists(new):
        os.remove(new)
    os.symlink(target, new)
    os.replace(new, path)
    return True


class Deployments:
    """The deployments folder of one node."""

    def __init__(self, root):
        self.root = root
        self.folder = root + DEPLOYMENTS

    def path(self, number):
        return os.path.join(self.folder, str(number))

    def pointed(self, name):
        """Number that `current` or `previous` names, or None."""
        path = os.path.join(self.folder, name)
        return int(os.readlink(path)) if os.path.islink(path) else None

    def numbers(self):
        if not os.path.isdir(self.folder):
            return []
        return sorted(int(n) for n in os.listdir(self.folder) if n.isdigit())

    def facts(self, number):
        text = read(os.path.join(self.path(number), RECORD))
        return json.loads(text) if text else {}

    def content(self, number):
        """(files, units, facts without number, time and reason); None for a deployment that is not whole."""
        if number is None:
            return None
        facts = self.facts(number)
        folder = self.path(number)
        if not facts or not os.path.isdir(os.path.join(folder, "units")):
            return None
        names = [n for n in sorted(os.listdir(folder)) if n not in (RECORD, "units")]
        files = {name: read(os.path.join(folder, name)) for name in names}
        folder = os.path.join(folder, "units")
        units = {name: read(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
        own = {key: value for key, value in facts.items() if key not in ("schema", "n", "when", "why", "serve_sha256")}
        return files, units, own

    def stage(self, number, files, units, facts, why):
        path = self.path(number)
        if os.path.exists(path):
            shutil.rmtree(path)
        os.makedirs(os.path.join(path, "units"))
        for name, text in files.items():
            write(os.path.join(path, name), text)
        for name, text in units.items():
            write(os.path.join(path, "units", name), text)
        record = dict(
            facts,
            schema=1,
            n=number,
            serve_sha256=hashlib.sha256(files["serve.yaml"].encode()).hexdigest(),
            when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            why=why,
        )
        write(os.path.join(path, RECORD), json.dumps(record, indent=2, sort_keys=True) + "\n")

    def unit_changes(self, number):
        """(unit files to write, unit files to remove) that make /etc/systemd/system equal to a deployment's units."""
        wanted = self.content(number)[1]
        current = self.content(self.pointed("current"))
        former = set(current[1]) if current else set()
        changed = {n: t for n, t in wanted.items() if read(os.path.join(self.root + UNITS, n)) != t}
        gone = {n for n in former - set(wanted) if os.path.exists(os.path.join(self.root + UNITS, n))}
        return changed, gone

    def link_changes(self, number):
        """(links to make, path to target; links to remove) that make the outside name a deployment and its files."""
        files, _, facts = self.content(number)
        wanted = {f"{FILES}/{name}": f"{DEPLOYMENTS}/current/{name}" for name in files}
        wanted[COMMAND] = f"{RELEASES}/{facts['release']}/venv/bin/glm-vllm"
        changed = {path: target for path, target in wanted.items() if self.target(path) != target}
        current = self.content(self.pointed("current"))
        former = {f"{FILES}/{name}" for name in current[0]} if current else set()
        return changed, {path for path in former - set(wanted) if self.target(path)}

    def target(self, path):
        """Where a link points; None when it is none."""
        return os.readlink(self.root + path) if os.path.islink(self.root + path) else None

    def promote(self, number):
        units, units_gone = self.unit_changes(number)
        links, links_gone = self.link_changes(number)
        for name, text in units.items():
            write(os.path.join(self.root + UNITS, name), text)
        for name in units_gone:
            os.remove(os.path.join(self.root + UNITS, name))
        before = self.pointed("current")
        if before not in (None, number):
            link(os.path.join(self.folder, "previous"), str(before))
        link(os.path.join(self.folder, "current"), str(number))
        for path, target in links.items():
            link(self.root + path, target)
        for path in links_gone:
            os.remove(self.root + path)

    def prune(self, keep):
        """Remove what `promoted` says is too old; returns the paths."""
        safe = {self.pointed("current"), self.pointed("previous")}
        old = [self.path(n) for n in [n for n in self.numbers() if n not in safe][: -keep or None]]
        named = {self.facts(n).get("release") for n in self.numbers() if self.path(n) not in old}
        folder = self.root + RELEASES
        unnamed = set(os.listdir(folder)) - named if os.path.isdir(folder) else set()
        for release in sorted(unnamed - self.running(unnamed)):
            old += [os.path.join(folder, release), *sorted(glob.glob(f"{self.root}{CACHES}/{release}-*"))]
        for path in old:
            shutil.rmtree(path)
        return old

    def running(self, releases):
        """Those of the releases that a process was started from."""
        found = set()
        for path in glob.glob(self.root + "/proc/[0-9]*/cmdline"):
            try:
                line = read(path) or ""
            except (OSError, UnicodeDecodeError):
                continue  # it ended meanwhile, or is not ours
            found |= {release for release in releases if f"{RELEASES}/{release}/" in line}
        return found


def main():
    module = AnsibleModule(
        argument_spec=dict(
            state=dict(type="str", required=True, choices=["planned", "staged", "promoted"]),
            number=dict(type="int"),
            files=dict(type="dict", default={}),
            units=dict(type="dict", default={}),
            facts=dict(type="dict", default={}),
            why=dict(type="str", default="site.yml"),
            keep=dict(type="int", default=3),
            root=dict(type="str", default=""),
        ),
        required_if=[
            ("state", "planned", ("files",)),
            ("state", "staged", ("files", "number")),
            ("state", "promoted", ("number",)),
        ],
        supports_check_mode=True,
    )
    p = module.params
    store = Deployments(p["root"])
    wanted = (p["files"], p["units"], p["facts"])
    current = store.pointed("current")

    if p["state"] == "planned":
        number = max([*store.numbers(), 0]) + 1
        module.exit_json(changed=False, differs=store.content(current) != wanted, current=current, number=number)

    if p["state"] == "staged":
        if store.content(p["number"]) == wanted:
            module.exit_json(changed=False, number=p["number"])
        before = store.content(current)
        diff = [
            dict(before_header=name, after_header=f"{store.path(p['number'])}/{name}", before=old or "", after=new)
            for name, old, new in [
                *((n, (before[0] if before else {}).get(n, ""), t) for n, t in p["files"].items()),
                *((f"units/{n}", (before[1] if before else {}).get(n, ""), t) for n, t in p["units"].items()),
            ]
            if old != new
        ]
        if not module.check_mode:
            store.stage(p["number"], *wanted, p["why"])
        module.exit_json(changed=True, number=p["number"], diff=diff, path=store.path(p["number"]))

    # promoted
    if store.content(p["number"]) is None:
        if module.check_mode:  # it would have been staged by the task before
            module.exit_json(changed=True, number=p["number"], path=store.path(p["number"]))
        module.fail_json(
            msg=f"{store.path(p['number'])} is not a whole deployment: run site.yml again, which stages it anew."
        )
    units, units_gone = store.unit_changes(p["number"])
    will_change = bool(units or units_gone or any(store.link_changes(p["number"])) or current != p["number"])
    removed = []
    if will_change and not module.check_mode:
        store.promote(p["number"])
        removed = store.prune(p["keep"])
    module.exit_json(
        changed=will_change,
        number=p["number"],
        units_changed=sorted(units),
        units_removed=sorted(units_gone),
        removed=removed,
        diff=dict(before=f"current -> {current}\n", after=f"current -> {p['number']}\n"),
    )


if __name__ == "__main__":
    main()
