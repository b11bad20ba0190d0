"""print_once: on the terminal, and in no log, result, diff or verbose output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLAY = """
- hosts: localhost
  gather_facts: false
  tasks:
    - print_once: {text: "the-{{ 'sec' }}ret-is-here"}
      no_log: %s
      register: shown
    - ansible.builtin.debug: {var: shown}
"""


def play(tmp_path: Path, no_log: str) -> tuple[str, str]:
    """(terminal, log file) of a verbose run."""
    (tmp_path / "play.yml").write_text(PLAY % no_log)
    run = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", "localhost,", "-c", "local", "-vvv", "--diff"]
        + [tmp_path / "play.yml"],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_LOG_PATH": str(tmp_path / "log")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return run.stdout + run.stderr, (tmp_path / "log").read_text()


def test_shown_once_and_never_logged(tmp_path):
    """One line on the terminal; the log file, the registered result and -vvv don't have it."""
    terminal, log = play(tmp_path, "true")
    assert terminal.count("the-secret-is-here") == 1
    assert "the-secret-is-here" not in log and "failed=0" in log and "changed=0" in log


def test_refuses_without_no_log(tmp_path):
    """A task without no_log would show its argument in every callback."""
    terminal, log = play(tmp_path, "false")
    assert "set no_log: true" in terminal and "failed=1" in log
    assert "the-secret-is-here" not in log
