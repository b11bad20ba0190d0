# SPDX-License-Identifier: Apache-2.0
"""Three nodes, in a ring of cables and in a switch. The engine is a pair's; the network is not."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import bed
import pair
import pytest
import yaml

NODES = ["spark-a", "spark-b", "spark-c"]
pytestmark = pytest.mark.full


@pytest.fixture
def three(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A bed of three nodes; its inventory."""
    state = Path(f"{bed.STATE}-3")
    for name, value in {"PREFIX": f"{bed.PREFIX}3", "STATE": state, "NODES": 3, "RING": request.param}.items():
        monkeypatch.setenv(f"TWIN_{name}", str(value))
    groups = {"head": {"hosts": {NODES[0]: {}}}, "workers": {"hosts": dict.fromkeys(NODES[1:], {})}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sparks": {"children": groups}}))
    subprocess.run([bed.ROOT / "twin/twin.sh", "up"], check=True, env=os.environ)
    yield [str(tmp_path / "hosts.yml"), str(state / "run/inventory.yml")]
    subprocess.run([bed.ROOT / "twin/twin.sh", "clean"], check=True, env=os.environ)


def converge(inventory: list[str], **variables: object) -> None:
    """Twice; the second run changes nothing."""
    common = {"cx7_network_rdma": "none", "cx7_network_min_gbps": 0, "glm_profile": "twin"}
    run = pair.run_playbook("playbooks/network.yml", inventory=inventory, **common, **variables)
    assert run.status == 0, run.failures()
    again = pair.run_playbook("playbooks/network.yml", inventory=inventory, **common, **variables)
    assert again.status == 0 and again.changed() == {}


def reached(node: str, expected: int) -> None:
    """Every name of the fabric that a node knows answers a full frame."""
    lines = bed.on(node, "sed", "-n", "/BEGIN/,/END/p", "/etc/hosts").splitlines()
    names = [line.split()[1] for line in lines if ".fabric" in line]
    assert len(names) == expected, names
    for name in names:
        bed.on(node, "ping", "-c1", "-W2", "-Mdo", "-s8972", name)


@pytest.mark.parametrize("three", ["1"], indirect=True)
def test_a_ring(three: list[str]) -> None:
    subnets = [{"subnet": f"192.168.{170 + number}.0/24"} for number in range(6)]
    converge(three, cx7_network_rails=subnets)
    for node in NODES:
        rails = json.loads(bed.on(node, "cat", "/etc/glm-vllm/fabric.json"))["rails"]
        assert len(rails) == 4 and len({rail["peer"] for rail in rails}) == 4
        reached(node, 8)


@pytest.mark.parametrize("three", [""], indirect=True)
def test_a_switch(three: list[str]) -> None:
    converge(three, cx7_network_switch=True, cx7_network_mtu=9000)
    for node in NODES:
        assert len(json.loads(bed.on(node, "cat", "/etc/glm-vllm/fabric.json"))["rails"]) == 2
        reached(node, 6)
