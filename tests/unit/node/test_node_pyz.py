"""The action plugin `node_pyz`: the same sources give the same bytes, and the file runs on bare Python."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
sys.path.insert(0, str(REPOSITORY / "plugins/action"))
node_pyz = pytest.importorskip("node_pyz", reason="needs ansible-core")


@pytest.fixture
def pyz(tmp_path) -> Path:
    path = tmp_path / "node.pyz"
    path.write_bytes(node_pyz.build())
    return path


def test_same_sources_same_bytes(tmp_path):
    copy = tmp_path / "src"
    shutil.copytree(node_pyz.SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for file in copy.rglob("*.py"):
        os.utime(file, (1, 1))
        file.chmod(0o600)
    assert node_pyz.build(copy) == node_pyz.build()


def test_a_changed_source_changes_the_bytes(tmp_path):
    copy = tmp_path / "src"
    shutil.copytree(node_pyz.SOURCES, copy)
    with (copy / "glm_vllm_overlay/node/gate.py").open("a") as file:
        file.write("\n")
    assert node_pyz.build(copy) != node_pyz.build()


def test_holds_the_node_program_and_nothing_of_the_engine(pyz):
    names = set(zipfile.ZipFile(pyz).namelist())
    assert {"__main__.py", "glm_vllm_overlay/cli.py", "glm_vllm_overlay/node/fabric.py"} <= names
    assert not any("exl3" in name for name in names)


def test_runs_without_a_site(node, pyz):
    command = [sys.executable, "-I", "-S", str(pyz), "fabric", "--json"]
    result = subprocess.run(command, env=node.environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["environment"]["VLLM_HOST_IP"] == node.address


def test_the_node_parts_import_the_standard_library_only():
    script = (
        "import pkgutil, importlib, sys; sys.path.insert(0, sys.argv[1]); import glm_vllm_overlay.node as node;"
        "[importlib.import_module('glm_vllm_overlay.node.' + m.name) for m in pkgutil.iter_modules(node.__path__)];"
        "print(*{name.split('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    command = [sys.executable, "-I", "-S", "-c", script, str(node_pyz.SOURCES)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(result.stdout.split()) <= {"__main__", "glm_vllm_overlay", "__mp_main__"}


PLAY = """
- hosts: localhost
  gather_facts: false
  vars: {pyz: {dest: "%(dest)s", owner: "%(user)s", group: "%(group)s"}}
  tasks:
    - {node_pyz: "{{ pyz }}", register: foretold, check_mode: true}
    - {stat: {path: "%(dest)s"}, register: untouched}
    - {node_pyz: "{{ pyz }}", register: first}
    - {node_pyz: "{{ pyz }}", register: second}
    - {node_pyz: {mode: "0755"}, register: nameless, failed_when: false}
    - assert:
        that:
          - foretold is changed
          - not untouched.stat.exists
          - first is changed
          - second is not changed
          - "'dest is missing' in nameless.msg"
"""


def test_the_action_is_idempotent_and_knows_check_mode(tmp_path):
    destination = tmp_path / "node.pyz"
    values = {"dest": destination, "user": os.getuid(), "group": os.getgid()}
    (tmp_path / "play.yml").write_text(PLAY % values)
    (tmp_path / "ansible.cfg").touch()
    environment = os.environ | {
        "ANSIBLE_ACTION_PLUGINS": str(REPOSITORY / "plugins/action"),
        "ANSIBLE_LOCAL_TEMP": str(tmp_path / "local"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
        "ANSIBLE_CONFIG": str(tmp_path / "ansible.cfg"),
    }
    command = [sys.executable, "-m", "ansible", "playbook", "-i", "localhost,", "-c", "local"]
    command += ["-e", f"ansible_python_interpreter={sys.executable}", str(tmp_path / "play.yml")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert destination.read_bytes() == node_pyz.build()
    assert destination.stat().st_mode & 0o777 == 0o755
