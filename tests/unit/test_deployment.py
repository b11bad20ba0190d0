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


FILES = {"serve.yaml": "a: 1\n", "node.env": "GLM_NODE=a\n"}
TEMPLATE = {"chat_template.jinja": "{{ messages }}"}


def deploy(call, files=FILES, units=UNITS, facts=FACTS):
    plan = call(state="planned", files=files, units=units, facts=facts)
    number = plan["number"] if plan["differs"] else plan["current"]
    call(state="staged", number=number, files=files, units=units, facts=facts)
    return call(state="promoted", number=number)


@pytest.fixture
def release(tmp_path):
    """Makes a release's folder and one of its caches on the node; returns both."""

    def make(name):
        made = [tmp_path / f"opt/glm-vllm/releases/{name}", tmp_path / f"var/cache/glm-vllm/{name}-0123abcd"]
        for folder in made:
            (folder / "venv").mkdir(parents=True)
        return made

    return make


def test_first_deployment_is_installed_whole(call, tmp_path):
    result = deploy(call)
    assert result["changed"] and result["number"] == 1
    current = tmp_path / "var/lib/glm-vllm/deployments/current"
    assert current.readlink() == Path("1")
    assert (tmp_path / "etc/systemd/system/glm-vllm-head.service").read_text() == UNITS["glm-vllm-head.service"]
    for name, text in FILES.items():
        assert (tmp_path / "etc/glm-vllm" / name).readlink() == Path(f"/var/lib/glm-vllm/deployments/current/{name}")
        assert (current / name).read_text() == text
    assert (tmp_path / "usr/local/bin/glm-vllm").readlink() == Path("/opt/glm-vllm/releases/aaa/venv/bin/glm-vllm")
    record = json.loads((current / "deployment.json").read_text())
    assert (
        record["schema"] == 1 and record["n"] == 1 and record["release"] == "aaa" and len(record["serve_sha256"]) == 64
    )


def test_same_content_changes_nothing(call):
    deploy(call)
    plan = call(state="planned", files=FILES, units=UNITS, facts=FACTS)
    assert not plan["differs"] and plan["current"] == 1
    assert not deploy(call)["changed"]


@pytest.mark.parametrize(
    ("files", "units", "facts"),
    [
        (FILES | {"serve.yaml": "a: 2\n"}, UNITS, FACTS),
        (FILES | {"node.env": "GLM_NODE=b\n"}, UNITS, FACTS),
        (FILES | TEMPLATE, UNITS, FACTS),
        (FILES, UNITS | {"glm-vllm-head.service": "[Service]\nExecStart=/b\n"}, FACTS),
        (FILES, UNITS | {"ray-head.service": "[Service]\nExecStart=/r\n"}, FACTS),
        (FILES, UNITS, FACTS | {"release": "bbb"}),
        (FILES, UNITS, FACTS | {"drafter": {"name": "d", "revision": "r", "path": "/d"}}),
    ],
)
def test_any_difference_is_a_new_deployment_and_the_old_one_is_previous(call, tmp_path, files, units, facts):
    deploy(call)
    assert deploy(call, files, units, facts)["number"] == 2
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


def test_promoting_the_former_one_brings_its_files_back(call, tmp_path):
    deploy(call, FILES | TEMPLATE, UNITS | {"ray-head.service": "[Service]\n"})
    template, ray = tmp_path / "etc/glm-vllm/chat_template.jinja", tmp_path / "etc/systemd/system/ray-head.service"
    assert template.is_symlink() and ray.exists()
    (tmp_path / "etc/glm-vllm/fabric.json").write_text("{}")
    deploy(call)
    assert not template.is_symlink() and not ray.exists()
    assert sorted(p.name for p in template.parent.iterdir()) == ["fabric.json", "node.env", "serve.yaml"]
    assert call(state="promoted", number=1)["changed"]
    assert template.is_symlink() and ray.exists()
    assert not call(state="promoted", number=1)["changed"]


def test_file_that_was_none_of_a_deployments_becomes_its_link(call, tmp_path):
    (tmp_path / "etc/glm-vllm").mkdir(parents=True)
    (tmp_path / "etc/glm-vllm/node.env").write_text("GLM_NODE=old\n")
    deploy(call)
    assert (tmp_path / "etc/glm-vllm/node.env").is_symlink()


def test_unit_edited_by_hand_is_put_back(call, tmp_path):
    deploy(call)
    unit = tmp_path / "etc/systemd/system/glm-vllm-head.service"
    unit.write_text("edited")
    result = call(state="promoted", number=1)
    assert result["changed"] and result["units_changed"] == ["glm-vllm-head.service"]
    assert unit.read_text() == UNITS["glm-vllm-head.service"]


def test_check_mode_writes_nothing(call, tmp_path):
    assert call(check=True, state="staged", number=1, files=FILES, units=UNITS, facts=FACTS)["changed"]
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
        deploy(call, FILES | {"serve.yaml": f"a: {i}\n"})
    folder = tmp_path / "var/lib/glm-vllm/deployments"
    assert sorted(p.name for p in folder.iterdir() if p.name.isdigit()) == ["3", "4", "5", "6", "7"]
    call(state="promoted", number=3, keep=0)
    assert sorted(p.name for p in folder.iterdir() if p.name.isdigit()) == ["3", "7"]


def test_a_release_goes_with_the_last_deployment_that_names_it(call, release):
    made = {}
    for name in "abcdefg":
        made[name] = release(name)
        removed = deploy(call, facts=FACTS | {"release": name})["removed"]
    assert [name for name in made if made[name][0].exists()] == ["c", "d", "e", "f", "g"]
    assert [name for name in made if made[name][1].exists()] == ["c", "d", "e", "f", "g"]
    assert {str(path) for path in made["b"]} <= set(removed)


def test_a_release_that_a_process_runs_from_stays(call, release, tmp_path):
    runs, idle = release("aaa"), release("aab")
    process = tmp_path / "proc/17"
    process.mkdir(parents=True)
    (process / "cmdline").write_text(
        "/opt/glm-vllm/releases/aaa/venv/bin/python\0/opt/glm-vllm/releases/aaa/venv/bin/vllm"
    )
    release("new")
    deploy(call, facts=FACTS | {"release": "new"})
    assert all(path.exists() for path in runs) and not any(path.exists() for path in idle)


def test_what_has_not_changed_removes_nothing(call, release):
    deploy(call)
    folder, _ = release("built-and-not-yet-deployed")
    assert not deploy(call)["changed"] and folder.exists()
