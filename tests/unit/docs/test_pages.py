"""Pages that point at something: it must be there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[3]
PAGES = [
    REPOSITORY / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
]


def page_id(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_playbooks_and_make_targets_exist(page):
    text = page.read_text()
    for playbook in re.findall(r"\bplaybooks/[a-z-]+\.yml\b", text):
        assert (REPOSITORY / playbook).exists(), playbook
    targets = set(re.findall(r"(?m)^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text()))
    assert set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", text, re.MULTILINE)) <= targets


def test_the_readme_shows_real_variables_with_their_defaults():
    options: dict = {}
    for spec in (REPOSITORY / "roles").glob("*/meta/argument_specs.yml"):
        options |= yaml.safe_load(spec.read_text())["argument_specs"]["main"]["options"]
    rows = re.findall(r"(?m)^\| `([a-z0-9_]+)`(?:, `_[a-z]+`)? \| ([^|]*) \|", (REPOSITORY / "README.md").read_text())
    assert len(rows) > 8
    for name, shown in rows:
        if name == "cx7_network_rails":
            continue
        assert yaml.safe_load(shown.split(",")[0]) == options[name]["default"], name
