"""What users get wrong: one clear sentence in time, the running service untouched, and a re-run finishes the job."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import bed
import pair
import pytest


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Both engines go on with the start that they had, and answer as before."""
    with pair.service_untouched():
        yield


def refused(run: pair.Run, seconds: float) -> str:
    """All that a failed run says; AssertionError when it did not fail, took longer or changed anything."""
    assert run.status != 0
    assert run.seconds < seconds
    assert run.total("changed") == {}
    assert "Traceback" not in run.output
    return " ".join(text for texts in run.failures().values() for text in texts)


def test_option_that_vllm_would_drop() -> None:
    """Fails when `enable-prefix-caching: false`, which vLLM ignores silently, gets as far as a host."""
    said = refused(pair.run_playbook("site.yml", glm_vllm_overlay_extra_args={"enable-prefix-caching": False}), 60)
    assert "glm_vllm_overlay_extra_args" in said and "enable-prefix-caching" in said
    assert "no-enable-prefix-caching" in said or "glm_vllm_overlay_prefix_caching" in said


def test_node_unreachable() -> None:
    """Fails when the run hangs, or does not name the node, its address and what to check."""
    bed.twin("cut", f"mgmt:{bed.WORKER}")
    try:
        said = refused(pair.run_playbook("site.yml"), 90)
    finally:
        bed.twin("mend", f"mgmt:{bed.WORKER}")
    assert f"{bed.WORKER} does not answer at {bed.NET}.12: check its power, its management cable" in said


def test_wrong_ssh_key(tmp_path: Path) -> None:
    """Fails when a refused login is told as a node that is away."""
    key = tmp_path / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    config = (bed.STATE / "run/ssh_config").read_text()
    config = re.sub(r"IdentityFile \S+", f"IdentityFile {key}", config)
    config = re.sub(r"ControlPath \S+", f"ControlPath {tmp_path}/%C", config)  # no way in that is open already
    (tmp_path / "ssh_config").write_text(config)
    arguments = f"-F {tmp_path}/ssh_config"
    run = pair.run_playbook("site.yml", ansible_ssh_common_args=arguments, ansible_control_path_dir=str(tmp_path))
    said = refused(run, 60)
    for node in pair.NODES:
        assert f"{node} refuses the login of ops: put your SSH key on it with ssh-copy-id ops@" in said


def test_sudo_wants_a_password() -> None:
    """Fails when the run hangs at the prompt or does not say that -K is the way."""
    with pair.replaced(bed.WORKER, "/etc/sudoers.d/ops", lambda text: text.replace("NOPASSWD:", "")):
        said = refused(pair.run_playbook("site.yml"), 90)
    assert f"{bed.WORKER} asks for a sudo password: run again with -K" in said
    assert bed.HEAD not in said


def test_rerun_after_all_of_these_finds_nothing_to_do() -> None:
    """Fails when one of the refusals above left something behind."""
    run = pair.run_playbook("site.yml")
    assert run.status == 0, run.failures()
    assert run.total("changed") == {}


def test_port_is_taken() -> None:
    """Fails when a foreign server on 8888 is stopped unasked, or not named; then a re-run opens the gateway again."""
    bed.on(bed.HEAD, "systemctl", "stop", "nginx.service")
    bed.on(bed.HEAD, "systemd-run", "--quiet", "--unit=foreign", "python3", "-m", "http.server", "8888")
    try:
        pair.wait_for(pair.health, 20, "somebody else answers on 8888")
        said = refused(pair.run_playbook("site.yml"), 90)
        assert pair.show(bed.HEAD, "foreign.service", "ActiveState") == {"ActiveState": "active"}
    finally:
        bed.on(bed.HEAD, "systemctl", "stop", "foreign.service")
    assert re.search(r"Port 8888 is held by python3 \(process \d+, unit foreign.service\): stop it, or set ", said)
    assert "cuda_sm121_takeover: true" in said
    again = pair.run_playbook("site.yml")
    assert again.status == 0, again.failures()
    assert again.changed() == {bed.HEAD: ["Web server runs"]}


@pytest.mark.full
def test_no_room_for_a_release(tmp_path: Path) -> None:
    """Fails when a full disk stops a run that has nothing to build, or when one that has goes as far as building."""
    wanted = "lookup('ansible.builtin.vars', '__glm_vllm_overlay_twin') | combine({'release_bytes': 1099511627776})"
    room = {"__glm_vllm_overlay_platform": f"{{{{ {wanted} }}}}"}
    run = pair.run_playbook("playbooks/preflight.yml", **room)
    assert run.status == 0, run.failures()
    run = pair.run_playbook("playbooks/preflight.yml", project=pair.other_release(tmp_path), **room)
    assert re.search(r"has [\d.]+ GiB free on / and a release needs 1024.0: make room", refused(run, 60))


def test_wheel_with_another_hash(tmp_path: Path) -> None:
    """Fails when a wheel that is not the locked one is installed on one node, or the other goes on alone.

    That a re-run then builds and serves the new release is shown in test_together.py, under `make test-full`.
    """
    project = pair.other_release(tmp_path)
    before = {node: releases(node) for node in pair.NODES}
    try:
        with pair.wrong_wheel(bed.WORKER):
            run = pair.run_playbook("playbooks/release.yml", project=project)
        assert run.status != 0
        assert list(run.failures()) == [bed.WORKER]
        assert re.search(rf"hash mismatch for `{pair.WHEEL}", run.output, re.IGNORECASE)
        (half,) = releases(bed.WORKER) - before[bed.WORKER]
        assert "manifest.json" not in bed.on(bed.WORKER, "ls", f"/opt/glm-vllm/releases/{half}").split()
        for node in pair.NODES:
            assert half not in bed.on(node, "readlink", "/usr/local/bin/glm-vllm")
    finally:
        for node in pair.NODES:
            for new in releases(node) - before[node]:
                bed.on(node, "sh", "-c", f"cd /opt/glm-vllm/releases/{new} && [ -e manifest.json ] || rm -r $PWD")


def releases(node: str) -> set[str]:
    """Names of the releases on a node, whole or not."""
    return set(bed.on(node, "ls", "/opt/glm-vllm/releases").split())
