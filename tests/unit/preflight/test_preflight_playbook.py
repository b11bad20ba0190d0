"""The real ansible-playbook on real inventory folders, with no host in reach."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")


def preflight(inventory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The inventory's part of preflight alone."""
    return play("playbooks/preflight.yml", "-i", inventory, "--tags", "inventory", *arguments)


def play(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PLAYBOOK, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def inventory(tmp_path) -> Path:
    return Path(shutil.copytree(REPOSITORY / "inventory/sparks", tmp_path / "sparks"))


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert text.count(old) == 1, f"{file} no longer holds {old!r} once"
    file.write_text(text.replace(old, new))


def line(file: Path, text: str) -> int:
    return next(number for number, row in enumerate(file.read_text().splitlines(), 1) if text in row)


@pytest.mark.parametrize("name", ["sparks", "twin"])
def test_the_shipped_inventories_pass_in_seconds(name):
    start = time.monotonic()
    done = preflight(REPOSITORY / "inventory" / name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok=1 " in done.stdout
    assert "unreachable=0" in done.stdout
    assert time.monotonic() - start < 15


def test_every_problem_with_file_and_line(inventory):
    serving, network = inventory / "group_vars/all/serving.yml", inventory / "group_vars/all/network.yml"
    replace(serving, "glm_vllm_overlay_max_num_seqs: 4", 'glm_vllm_overlay_max_num_seqs: "4"')
    replace(network, "glm_vllm_overlay_http: lan", "glm_vllm_overlay_http: off")
    replace(serving, "glm_vllm_overlay_executor: mp", "glm_vllm_overlay_executr: mp")
    done = preflight(inventory)
    assert done.returncode == 2
    assert "The inventory has 3 problems; no host was contacted." in done.stdout
    off = line(network, "_http: off")
    for sentence in (
        f'glm_vllm_overlay_max_num_seqs is the text "4" ({serving}, line {line(serving, "max_num_seqs")}): '
        "write a whole number without quotes.",
        f"glm_vllm_overlay_http is false, for so YAML reads a bare off ({network}, line {off}): "
        'write "off" with quotes.',
        f"glm_vllm_overlay_executr is no variable of any role ({serving}, line {line(serving, 'executr')}): "
        "write glm_vllm_overlay_executor.",
    ):
        assert sentence in done.stdout


def test_two_heads(inventory):
    replace(inventory / "hosts.yml", "    workers:\n", "        spark-c:\n    workers:\n")
    done = preflight(inventory)
    assert done.returncode == 2
    assert "Group head has 2 hosts (spark-a, spark-c): leave exactly one there." in done.stdout


def test_a_number_on_the_command_line_is_a_text(inventory):
    wrong = preflight(inventory, "-e", "glm_vllm_overlay_gate_timeout=60")
    assert wrong.returncode == 2
    assert 'glm_vllm_overlay_gate_timeout is the text "60": write a whole number without quotes.' in wrong.stdout
    right = preflight(inventory, "-e", '{"glm_vllm_overlay_gate_timeout": 60}')
    assert right.returncode == 0, right.stdout


def test_an_expression_that_fails(inventory):
    serving = inventory / "group_vars/all/serving.yml"
    replace(serving, '# glm_vllm_overlay_wheelhouse: ""', 'glm_vllm_overlay_wheelhouse: "{{ nowhere }}/wheels"')
    done = preflight(inventory)
    assert done.returncode == 2
    assert "glm_vllm_overlay_wheelhouse can't be evaluated, 'nowhere' is undefined" in done.stdout


def test_a_problem_stops_before_any_machine(inventory):
    replace(inventory / "group_vars/all/serving.yml", "glm_vllm_overlay_executor: mp", "glm_vllm_overlay_executor: mpi")
    done = play("playbooks/preflight.yml", "-i", inventory)
    assert done.returncode == 2
    assert "TASK [SSH and sudo answer]" not in done.stdout


def test_half_a_pair_is_refused_before_it_is_reached():
    done = play("site.yml", "-i", "inventory/sparks", "--limit", "spark-b")
    assert done.returncode == 2
    assert "spark-a is left out by --limit" in " ".join(done.stdout.split())
    assert "TASK [SSH and sudo answer]" not in done.stdout
