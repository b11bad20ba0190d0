"""tools/argument_docs.py, run as `make docs` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

SPEC = """\
argument_specs:
  main:
    options:
      demo_mode: {type: str, choices: [a, b], default: a, description: "Which C(mode)."}
      demo_list:
        type: list
        elements: dict
        default: []
        description: [One., Two.]
        options:
          key: {type: int, required: true, description: A number.}
"""
ROW = '| `demo_mode` | `a` \\| `b` | `"a"` | Which `mode`. |'


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, REPOSITORY / "tools/argument_docs.py", *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture
def roles(tmp_path) -> Path:
    role = tmp_path / "demo"
    (role / "meta").mkdir(parents=True)
    (role / "defaults").mkdir()
    (role / "meta/argument_specs.yml").write_text(SPEC)
    (role / "defaults/main.yml").write_text("demo_mode: a\ndemo_list: []\n")
    return tmp_path


def test_the_committed_tables_are_up_to_date():
    done = run("--check")
    assert done.returncode == 0, done.stderr


def test_writes_the_table_and_keeps_the_rest(roles):
    assert run("--roles", roles).returncode == 0
    readme = roles / "demo/README.md"
    readme.write_text("# Mine\n\nBefore.\n" + readme.read_text().removeprefix("# demo\n") + "After.\n")
    assert run("--roles", roles).returncode == 0
    text = readme.read_text()
    assert text.startswith("# Mine\n\nBefore.\n")
    assert text.endswith("After.\n")
    assert ROW in text
    assert "| `demo_list` | list of dict | `[]` | One. Two. |" in text
    assert "| `demo_list[].key` | int | required | A number. |" in text


def test_check_fails_on_a_difference_and_writes_nothing(roles):
    assert run("--roles", roles).returncode == 0
    assert run("--roles", roles, "--check").returncode == 0
    readme = roles / "demo/README.md"
    stale = readme.read_text().replace(ROW, "")
    readme.write_text(stale)
    done = run("--roles", roles, "--check")
    assert done.returncode == 1
    assert done.stderr == f"{readme} is out of date: run make docs.\n"
    assert readme.read_text() == stale


def test_a_default_that_contradicts_its_description(roles):
    (roles / "demo/defaults/main.yml").write_text("demo_mode: b\ndemo_list: []\n")
    done = run("--roles", roles)
    assert done.returncode == 1
    assert done.stderr == "demo_mode of demo defaults to 'b', and its argument_specs says 'a': make them equal.\n"


def test_a_variable_that_nothing_describes(roles):
    (roles / "demo/defaults/main.yml").write_text("demo_mode: a\ndemo_list: []\ndemo_more: 1\n")
    done = run("--roles", roles)
    assert done.returncode == 1
    assert (
        "demo_more stands in defaults/main.yml and not in meta/argument_specs.yml of demo: describe it." in done.stderr
    )


def test_a_readme_without_markers(roles):
    (roles / "demo/README.md").write_text("# Mine\n")
    done = run("--roles", roles)
    assert done.returncode == 1
    assert "once each: the table of variables goes between them." in done.stderr
