"""Executor ray: there, twice, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import bed
import pair
import pytest
from testinfra.host import Host

pytestmark = pytest.mark.full
RAY = {"glm_vllm_overlay_executor": "ray"}


@pytest.fixture(scope="module")
def switched(converged: None) -> Iterator[pair.Run]:
    """The run that switches to ray; switched back afterwards, which the last test below looks at."""
    run = pair.run_playbook("site.yml", **RAY)
    yield run
    back = pair.run_playbook("site.yml")
    assert back.status == 0, back.failures()
    pair.wait_until_serving()


def rank_1(worker: Host) -> str:
    """Process id of the actor that runs rank 1."""
    return worker.check_output("pgrep --full '[r]ay::.*Worker' | head -1")


def test_switch_serves(switched: pair.Run) -> None:
    """Fails when the pair does not serve under Ray, or a unit is missing."""
    assert switched.status == 0, switched.failures()
    assert pair.answer() == pair.ANSWER
    assert pair.probe("--expect", pair.ANSWER)["ok"]
    for node, unit in ((bed.HEAD, "ray-head"), (bed.WORKER, "ray-worker")):
        assert pair.show(node, unit, "ActiveState", "UnitFileState")["ActiveState"] == "active"
        assert bed.state(node)["executor"] == "ray"
    assert pair.show(bed.WORKER, "glm-vllm-worker", "Type")["Type"] == "notify"


def test_second_run_changes_nothing(switched: pair.Run) -> None:
    """Fails for every task that says `changed` although all is as it should be."""
    with pair.service_untouched():
        run = pair.run_playbook("site.yml", **RAY)
    assert run.status == 0, run.failures()
    assert run.changed() == {}


def test_rank_1_has_its_own_node_s_environment(switched: pair.Run, worker: Host) -> None:
    """Fails when Ray carries the head's interfaces or address, or a key, to the worker."""
    environment = dict(
        line.split("=", 1)
        for line in worker.check_output(f"tr '\\0' '\\n' < /proc/{rank_1(worker)}/environ").splitlines()
        if "=" in line
    )
    rails = json.loads(worker.file("/etc/glm-vllm/fabric.json").content_string)["rails"]
    own = dict(
        line.split("=", 1) for line in worker.file("/run/glm-vllm/fabric.env").content_string.split() if "=" in line
    )
    assert environment["VLLM_HOST_IP"] == own["VLLM_HOST_IP"] == rails[0]["address"]
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        assert environment[name] == own[name]
        netdevs = environment[name].lstrip("=").split(",")
        assert all(worker.interface(netdev).exists for netdev in netdevs)
        assert rails[0]["address"] in worker.interface(netdevs[0]).addresses
    assert not [name for name in environment if "API_KEY" in name]
    assert bed.api_key() not in "".join(environment.values())


def test_worker_s_ray_dies_and_the_pair_meets_again(switched: pair.Run) -> None:
    """One start of the engine. Fails when the pair stays up without a rank, or stays down."""
    bed.on(bed.WORKER, "systemctl", "kill", "--signal=KILL", "ray-worker")
    pair.wait_for(lambda: pair.health() != 200, 60, "the head leaves service")
    pair.wait_until_serving()


def test_back_to_mp_leaves_nothing_of_ray(switched: pair.Run, head: Host, worker: Host) -> None:
    """One start of the engine. Fails when a unit, process, port, file or rule of Ray stays."""
    run = pair.run_playbook("site.yml")
    assert run.status == 0, run.failures()
    assert pair.answer() == pair.ANSWER
    for node in (head, worker):
        assert node.run("systemctl list-unit-files --no-legend 'ray-*'").stdout == ""
        assert node.run("pgrep --full '[r]aylet|[g]cs_server|[r]ay::'").rc == 1
        assert node.check_output("ss -Hltn 'sport >= :6379 and sport <= :6390'") == ""
        assert node.check_output("systemctl list-units --failed --plain --no-legend") == ""
        assert not node.file("/var/lib/glm-vllm/ray").exists
        assert not node.file("/var/lib/glm-vllm/.config").exists
        assert "6379" not in node.check_output("nft list ruleset")
    assert pair.run_playbook("site.yml").changed() == {}
