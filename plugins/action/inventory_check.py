"""Action ``inventory_check``: check the whole inventory on the controller, without contacting a host.

Takes no arguments. Fails with every problem at once, one sentence each on a line of its own.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase

REPOSITORY = Path(__file__).resolve().parents[2]
load = runpy.run_path(str(Path(__file__).resolve().parents[1] / "controller/own_code.py"))["load"]


class ActionModule(ActionBase):
    """Read the inventory through hostvars and hold it against the roles' argument_specs."""

    TRANSFERS_FILES = False
    _supports_check_mode = True
    _supports_diff = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result = super().run(tmp, task_vars)
        rules = load("plugins/controller/inventory_rules.py")
        variables = task_vars or {}
        problems = rules.check(self._inventory(rules, variables), schema(rules, REPOSITORY / "roles"))
        result["changed"] = False
        if problems:
            many = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
            lines = "\n".join(f"  * {problem}" for problem in problems)
            result.update(failed=True, msg=f"The inventory has {many}; no host was contacted.\n{lines}")
        else:
            result["msg"] = "The inventory is right."
        return result

    def _inventory(self, rules: Any, variables: dict[str, Any]) -> Any:
        hostvars = variables["hostvars"]
        groups = {name: [str(host) for host in hosts] for name, hosts in variables["groups"].items()}
        hosts = {}
        for host in {name for group in ("sparks", "head", "workers") for name in groups.get(group, ())}:
            names = [
                name for name in hostvars[host] if name.startswith((*rules.PREFIXES, "ansible_host", "ansible_port"))
            ]
            hosts[host] = {name: _evaluate(rules, hostvars[host], name) for name in names}
        return rules.Inventory(groups, hosts, _sources(variables))


def _evaluate(rules: Any, variables: Any, name: str) -> Any:
    try:
        return variables[name]
    except AnsibleError as error:
        return rules.Broken(str(error).strip().splitlines()[0].rstrip("."))


def _sources(variables: dict[str, Any]) -> list[Path]:
    """Inventory folders and files as the user would write them: relative to the working folder when below it."""
    found = []
    for source in variables.get("ansible_inventory_sources") or []:
        path = Path(source)
        if not path.exists():
            continue
        try:
            path = path.resolve().relative_to(Path.cwd())
        except ValueError:
            path = path.resolve()
        found += [path] if path.is_dir() else [path, path.parent / "group_vars", path.parent / "host_vars"]
    return [path for path in found if path.exists()]


def schema(rules: Any, roles: Path) -> Any:
    """Options and defaults of all roles below ``roles``."""
    options: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for spec in sorted(roles.glob("*/meta/argument_specs.yml")):
        options |= yaml.safe_load(spec.read_text(encoding="utf-8"))["argument_specs"]["main"].get("options", {})
    for file in sorted(roles.glob("*/defaults/main.yml")):
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        # A default that is an expression needs a host's facts, which nobody has read yet.
        defaults |= {name: value for name, value in values.items() if "{{" not in str(value)}
    return rules.Schema(options, defaults, _refuse_argument)


def _refuse_argument(key: str, value: Any) -> str:
    try:
        load("plugins/filter/serve_yaml.py").merge_extra({}, {key: value})
    except AnsibleError as error:
        return str(error)
    return ""
