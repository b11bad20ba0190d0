"""node_reach: a node that can't be reached is one sentence, not a stack of ssh messages."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PLAY = """\
- hosts: all
  gather_facts: false
  become: true
  tasks:
    - node_reach:
"""


@pytest.fixture
def play(tmp_path):
    """Run node_reach against one host with ``variables``; returns exit status and output."""
    (tmp_path / "play.yml").write_text(PLAY)

    def run(**variables: object) -> tuple[int, str]:
        words = " ".join(f"{name}={value!r}" for name, value in variables.items())
        (tmp_path / "hosts").write_text(f"spark-b {words}\n")
        done = subprocess.run(
            [Path(sys.executable).with_name("ansible-playbook"), tmp_path / "play.yml", "-i", tmp_path / "hosts"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout

    return run


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nobody_listens(play, closed_port):
    status, output = play(ansible_host="127.0.0.1", ansible_port=closed_port)
    assert status == 2
    assert "spark-b is up and runs no SSH server: start ssh on it, or correct ansible_host and ansible_port." in output


def test_a_name_that_does_not_exist(play):
    status, output = play(ansible_host="spark-b.invalid")
    assert status == 2
    assert "spark-b has no address: spark-b.invalid can't be resolved: correct ansible_host in hosts.yml." in output


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("echo 'sudo: a password is required' >&2; exit 1", "spark-b asks for a sudo password: run again with -K."),
        (
            "echo 'nvidia is not in the sudoers file.' >&2; exit 1",
            "no sudo: add the user to the group sudo, or choose another ansible_user.",
        ),
    ],
)
def test_sudo_that_refuses(play, tmp_path, said, sentence):
    sudo = tmp_path / "sudo"
    sudo.write_text(f"#!/bin/sh\n{said}\n")
    sudo.chmod(0o755)
    status, output = play(ansible_connection="local", ansible_become_exe=str(sudo), ansible_become_user="nobody")
    assert status == 2
    assert sentence in output


def test_a_node_that_answers(play, tmp_path):
    sudo = tmp_path / "sudo"
    sudo.write_text('#!/bin/sh\nwhile [ "$1" != /bin/sh ]; do shift; done\nexec "$@"\n')
    sudo.chmod(0o755)
    status, output = play(ansible_connection="local", ansible_become_exe=str(sudo), ansible_become_user="nobody")
    assert status == 0, output


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "Failed to connect to the host via ssh: ops@192.0.2.12: Permission denied (publickey).",
            "spark-b refuses the login of ops: "
            "put your SSH key on it with ssh-copy-id ops@192.0.2.12, or correct ansible_user.",
        ),
        (
            "WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! Host key verification failed.",
            "spark-b shows another host key than last time: find out why, then ssh-keygen -R 192.0.2.12.",
        ),
        (
            "Host key verification failed.",
            "spark-b has a host key that this controller does not know: "
            "log in once with ssh nvidia@192.0.2.12 and compare it.",
        ),
        (
            "ssh: connect to host 192.0.2.12 port 22: Connection timed out",
            "spark-b does not answer at 192.0.2.12: "
            "check its power, its management cable and ansible_host in hosts.yml.",
        ),
    ],
)
def test_words_of_ssh(node_reach, text, sentence):
    names = {"host": "spark-b", "address": "192.0.2.12", "user": "nvidia"}
    assert node_reach.sentence(node_reach.SSH, text, **names) == sentence
