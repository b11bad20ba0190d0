"""The command itself: exit codes, --json, no traceback, lazy imports."""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from glm_vllm_overlay import __version__, cli
from glm_vllm_overlay.node import fabric


def test_version(node):
    out = subprocess.run(
        [sys.executable, "-m", "glm_vllm_overlay", "--version"], env=node.environment(), capture_output=True, text=True
    )
    assert out.stdout.strip() == f"glm-vllm-overlay {__version__}"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_exists_and_takes_json(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["frobnicate"], ["fabric", "--no-such-option"]])
def test_bad_usage_is_2(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_internal_error_is_one_sentence_and_a_file(node, glm_vllm, monkeypatch, tmp_path):
    monkeypatch.setattr(fabric, "resolve", lambda paths: 1 / 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code, out, err = glm_vllm("fabric", "--json")
    assert code == 3
    assert len(err.strip().splitlines()) == 1
    assert json.loads(out) == {"schema": 1, "ok": False, "message": json.loads(out)["message"]}
    details = Path(re.search(r"the details are in (\S+)", err).group(1))
    assert "ZeroDivisionError" in details.read_text()
    (tmp_path / "glm-vllm-plan-else.txt").touch()
    assert glm_vllm("fabric")[0] == 3
    left = {path.name for path in tmp_path.glob("glm-vllm-*")}
    assert len(left) == 2 and details.name not in left, "the newest of each command stays"


def test_internal_error_without_a_temporary_folder(node, glm_vllm, monkeypatch):
    monkeypatch.setattr(fabric, "resolve", lambda paths: 1 / 0)
    nowhere = functools.partial(tempfile.NamedTemporaryFile, dir="/no/such/folder")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", nowhere)
    code, _, err = glm_vllm("fabric")
    assert code == 3
    assert "set TMPDIR" in err
    assert "Traceback" not in err


def test_missing_input_is_2_with_json(node, glm_vllm):
    (node.root / "etc/glm-vllm/fabric.json").unlink()
    code, out, err = glm_vllm("fabric", "--json")
    assert code == 2
    assert json.loads(out)["ok"] is False
    assert "fabric.json does not exist: run site.yml" in err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{",
        '{"schema": 1}',
        '{"schema":1,"rdma":"auto","peer":"b","rails":[]}',
        '{"schema":1,"rdma":"auto","peer":"b","rails":[{"address":"x","peer":"y"}]}',
    ],
)
def test_damaged_fabric_json_is_2(node, glm_vllm, text):
    (node.root / "etc/glm-vllm/fabric.json").write_text(text)
    code, _, err = glm_vllm("fabric")
    assert code == 2
    assert "fabric.json" in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("GLM_ROLE=boss", "GLM_ROLE=boss"),
        ("GLM_EXECUTOR=dask", "GLM_EXECUTOR=dask"),
        ("GLM_NODE_RANK=x", "usable line"),
    ],
)
def test_damaged_node_env_is_2(node, glm_vllm, line, said):
    node.env(**dict([line.split("=")]))
    code, _, err = glm_vllm("status")
    assert code == 2
    assert said in err


def test_no_systemd_is_2(node, glm_vllm):
    node.program(node.root / "bin/systemctl", "#!/bin/sh\nexit 1\n")
    code, _, err = glm_vllm("status")
    assert code == 2
    assert "systemd cannot be asked" in err


@pytest.mark.parametrize("command", ["fabric", "status"])
def test_answers_in_a_fifth_of_a_second(node, peer, command):
    def seconds() -> float:
        process = node.start(command, "--json")
        process.stdout.read()
        usage = os.wait4(process.pid, 0)[2]
        # Processor time, with that of `ip` and `systemctl`: elapsed time would also measure what else runs here.
        return usage.ru_utime + usage.ru_stime

    assert min(seconds() for _ in range(3)) < 0.2


def test_only_the_chosen_command_is_imported(node):
    script = (
        "import sys; from glm_vllm_overlay import cli; cli.main(['fabric', '--check']);"
        "print(*[name for name in sys.modules if name.startswith('glm_vllm_overlay.')])"
    )
    out = subprocess.run([sys.executable, "-c", script], env=node.environment(), capture_output=True, text=True).stdout
    assert "node.fabric" in out
    assert not {"glm_vllm_overlay.node.serve", "glm_vllm_overlay.node.watch", "glm_vllm_overlay.exl3"} & set(
        out.split()
    )
