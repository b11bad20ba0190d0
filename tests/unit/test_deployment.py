"""The deployment module, run as Ansible runs it: a program that reads JSON and prints JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = Path(__file__).parents[2] / "plugins/modules/deployment.py"
FACTS = {
    "release": "aaa",
    "executor": "mp",
    "model": {"name": "m", "revision": "r", "path": "/m"},
    "drafter": None,
}
UNITS = {"glm-vllm-head.service": "[Service]\nExecStart=/a\n", "glm-vllm-watch.service": "[Service]\nExecStart=/w\n"}


@pytest.fixture
def call(tmp_path):
    def run(check=False, **arguments):
        arguments |= {"root": str(tmp_path), "_ansible_check_mode": check}
        done = subprocess.run(
            [sys.executable, MODULE],
            input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.stdout, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def deploy(call, serve="a: 1\n", units=UNITS, facts=FACTS):
    plan = call(state="planned", serve_yaml=serve, units=units, facts=facts)
    number = plan["number"] if plan["differs"] else plan["current"]
    call(state="staged", number=number, serve_yaml=serve, units=units, facts=facts)
    return call(state="promoted", number=number)


def test_first_deployment_is_installed_whole(call, tmp_path):
    result = deploy(call)
    assert result["changed"] and result["number"] == 1
    current = tmp_path / "var/lib/glm-vllm/deployments/current"
    assert current.readlink() == Path("1")
    assert (tmp_path / "etc/systemd/system/glm-vllm-head.service").read_text() == UNITS["glm-vllm-head.service"]
    assert (tmp_path / "etc/glm-vllm/serve.yaml").readlink() == Path("/var/lib/glm-vllm/deployments/current/serve.yaml")
    assert (tmp_path / "usr/local/bin/glm-vllm").readlink() == Path("/opt/glm-vllm/releases/aaa/venv/bin/glm-vllm")
    record = json.loads((current / "deployment.json").read_text())
    assert (
        record["schema"] == 1 and record["n"] == 1 and record["release"] == "aaa" and len(record["serve_sha256"]) == 64
    )


def test_same_content_changes_nothing(call):
    deploy(call)
    plan = call(state="planned", serve_yaml="a: 1\n", units=UNITS, facts=FACTS)
    assert not plan["differs"] and plan["current"] == 1
    assert not deploy(call)["changed"]


@pytest.mark.parametrize(
    ("serve", "units", "facts"),
    [
        ("a: 2\n", UNITS, FACTS),
        ("a: 1\n", {**UNITS, "glm-vllm-head.service": "[Service]\nExecStart=/b\n"}, FACTS),
        ("a: 1\n", UNITS, {**FACTS, "release": "bbb"}),
        ("a: 1\n", UNITS, {**FACTS, "drafter": {"name": "d", "revision": "r", "path": "/d"}}),
    ],
)
def test_any_difference_is_a_new_deployment_and_the_old_one_is_previous(call, tmp_path, serve, units, facts):
    deploy(call)
    assert deploy(call, serve, units, facts)["number"] == 2
    folder = tmp_path / "var/lib/glm-vllm/deployments"
    assert (folder / "current").readlink() == Path("2") and (folder / "previous").readlink() == Path("1")
    assert (folder / "1/serve.yaml").read_text() == "a: 1\n"


def test_unit_that_only_the_former_had_goes_away_and_foreign_units_stay(call, tmp_path):
    deploy(call)
    foreign = tmp_path / "etc/systemd/system/foreign.service"
    foreign.write_text("x")
    fewer = {"glm-vllm-head.service": UNITS["glm-vllm-head.service"]}
    result = deploy(call, units=fewer)
    assert result["units_removed"] == ["glm-vllm-watch.service"]
    assert not (tmp_path / "etc/systemd/system/glm-vllm-watch.service").exists() and foreign.exists()


def test_unit_edited_by_hand_is_put_back(call, tmp_path):
    deploy(call)
    unit = tmp_path / "etc/systemd/system/glm-vllm-head.service"
    unit.write_text("edited")
    result = call(state="promoted", number=1)
    assert result["changed"] and result["units_changed"] == ["glm-vllm-head.service"]
    assert unit.read_text() == UNITS["glm-vllm-head.service"]


def test_check_mode_writes_nothing(call, tmp_path):
    assert call(check=True, state="staged", number=1, serve_yaml="a: 1\n", units=UNITS, facts=FACTS)["changed"]
    assert call(check=True, state="promoted", number=1)["changed"]
    assert not (tmp_path / "var").exists() and not (tmp_path / "etc").exists()


def test_half_a_deployment_is_refused(call, tmp_path):
    deploy(call)
    (tmp_path / "var/lib/glm-vllm/deployments/2").mkdir()
    result = call(state="promoted", number=2)
    assert result["failed"] and "not a whole deployment" in result["msg"]
    assert (tmp_path / "var/lib/glm-vllm/deployments/current").readlink() == Path("1")


def test_old_deployments_are_pruned_but_never_current_or_previous(call, tmp_path):
    for i in range(7):
        deploy(call, serve=f"a: {i}\n")
    folder = tmp_path / "var/lib/glm-vllm/deployments"
    assert sorted(p.name for p in folder.iterdir() if p.name.isdigit()) == ["3", "4", "5", "6", "7"]
