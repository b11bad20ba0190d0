"""Each step is a playbook of its own, where other roles' defaults are not loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEFAULTS = {
    name: (file.parts[-3], value)
    for file in sorted((ROOT / "roles").glob("*/defaults/main.yml"))
    for name, value in yaml.safe_load(file.read_text()).items()
}
FILES = [
    file
    for folder in ("tasks", "vars", "defaults", "templates", "handlers")
    for file in sorted((ROOT / "roles").glob(f"*/{folder}/**/*"))
    if file.suffix in (".yml", ".j2")
]
EXPRESSION = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|^ *(?:-? *when|that|loop|until|-):? .*$", re.DOTALL | re.MULTILINE)


def foreign(file: Path) -> list[tuple[str, str | None]]:
    """(variable, its default in words or None) for each use of another role's public variable in an expression."""
    role = file.relative_to(ROOT / "roles").parts[0]
    text = "\n".join(EXPRESSION.findall(file.read_text()))
    used = re.findall(r"(?<![\w.'\"])([a-z][a-z0-9_]+)\b(?:\s*\|\s*default\(([^()]*)\))?", text)
    return [(name, given or None) for name, given in used if name in DEFAULTS and DEFAULTS[name][0] != role]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT / "roles")))
def test_a_variable_of_another_role_has_that_roles_default(file):
    for name, given in foreign(file):
        assert given is not None, f"{name} is {DEFAULTS[name][0]}'s: without | default(...) this role needs that one"
        assert yaml.safe_load(given) == DEFAULTS[name][1], f"{name} | default({given}) is not its role's default"


def test_the_test_sees_what_it_is_about():
    """The toolkit's place is cuda-sm121's and the engine's units name it."""
    uses = foreign(ROOT / "roles/glm-vllm-overlay/vars/main/gb10.yml")
    assert ("cuda_sm121_cuda_home", "'/usr/local/cuda-13.0'") in uses


@pytest.mark.parametrize("file", sorted((ROOT / "playbooks").glob("*.yml")), ids=lambda file: file.name)
def test_no_role_is_imported_on_a_condition(file):
    """The condition would be the role's handlers' too, for the whole play: they would not run on the other hosts."""
    tasks = [task for play in yaml.safe_load(file.read_text()) for task in play.get("tasks", ())]
    assert not [task["name"] for task in tasks if "ansible.builtin.import_role" in task and "when" in task]


def test_apt_waits_for_the_updates_of_a_new_machine():
    """After its first boot a new Spark updates itself and holds the lock; the module waits one minute."""
    found = 0
    for file in [*sorted((ROOT / "roles").glob("*/tasks/*.yml")), *sorted((ROOT / "playbooks").rglob("*.yml"))]:
        for options in re.findall(r"^( +)ansible\.builtin\.apt:\n((?:\1  .*\n)+)", file.read_text(), re.MULTILINE):
            found += 1
            assert "lock_timeout: 600\n" in options[1], file
    assert found >= 10
