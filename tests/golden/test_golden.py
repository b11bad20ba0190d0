"""Everything rendered for inventory/sparks equals what is committed, and the programs that read it accept it.

`make golden` (GOLDEN_UPDATE=1) rewrites the committed files; review the difference like source.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent
TEMPLATES = sorted((REPOSITORY / "roles").glob("*/templates/*.j2"))
EXECUTORS = {"sparks": "mp", "sparks-ray": "ray"}
HOSTS = ("spark-a", "spark-b")


def run(*command: str | Path, **options: object) -> str:
    """Standard output and error of a command that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def rendered(tmp_path_factory) -> Path:
    """Folder with sparks/<host>/… (executor mp) and sparks-ray/<host>/…"""
    bed = tmp_path_factory.mktemp("golden")
    (bed / "templates").mkdir()
    for template in TEMPLATES:
        (bed / "templates" / template.name).symlink_to(template)
    shutil.copy(GOLDEN / "render.yml", bed)
    for name, executor in EXECUTORS.items():
        (bed / name).mkdir()
        run(
            Path(sys.executable).with_name("ansible-playbook"),
            bed / "render.yml",
            *("-i", REPOSITORY / "inventory/sparks"),
            *("-e", f"golden={bed / name}"),
            *("-e", f"glm_vllm_overlay_executor={executor}"),
            cwd=REPOSITORY,
            env=os.environ | {"ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg")},
        )
        for host in HOSTS:
            document = bed / name / f"{host}.json"
            for path, text in json.loads(document.read_text()).items():
                file = bed / name / host / path.lstrip("/")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            document.unlink()
    return bed


def files(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*")) if file.is_file()}


def program(name: str) -> str:
    """Path of a program; without it the test is skipped, and fails in CI."""
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    return found or missing(f"{name} is not installed: run make setup")


def missing(what: str) -> NoReturn:
    (pytest.fail if os.environ.get("CI") else pytest.skip)(what)


def test_every_template_is_rendered_and_no_two_share_a_name():
    names = [template.name for template in TEMPLATES]
    assert len(names) == len(set(names))
    deployment = REPOSITORY / "roles/glm-vllm-overlay/vars/main/main.yml"
    text = (GOLDEN / "render.yml").read_text() + deployment.read_text()
    assert {name for name in names if f"src: {name}" not in text and f"'{name}'" not in text} == set()


@pytest.mark.parametrize("name", EXECUTORS)
def test_renders_what_is_committed(rendered, name):
    committed = GOLDEN / name
    if os.environ.get("GOLDEN_UPDATE"):
        shutil.rmtree(committed, ignore_errors=True)
        shutil.copytree(rendered / name, committed)
    assert files(rendered / name) == files(committed), "run `make golden` and review the difference"


def test_both_nodes_share_one_serve_yaml(rendered):
    for name in EXECUTORS:
        first, second = ((rendered / name / host / "etc/glm-vllm/serve.yaml").read_bytes() for host in HOSTS)
        assert first == second


def test_nothing_rendered_names_this_machine_or_leaves_a_hole(rendered):
    for name in EXECUTORS:
        for file, text in files(rendered / name).items():
            assert not re.search(r"\{\{|\{%|\bundefined\b|\bNone\b", text), file
            assert str(REPOSITORY) not in text, file
            assert str(rendered) not in text, file


def test_systemctl_show_will_tell_the_truth(rendered):
    unit = (rendered / "sparks/spark-a/etc/systemd/system/glm-vllm-head.service").read_text()
    assert "Environment=GLM_GPU_MEMORY_UTILIZATION=0.87 GLM_SPECULATOR=dflash2 ABLIT=0\n" in unit


@pytest.mark.parametrize("name", EXECUTORS)
@pytest.mark.parametrize("host", HOSTS)
def test_systemd_accepts_the_units(rendered, tmp_path, name, host):
    """Programs of a node stand in the root as empty files: verify looks whether they exist, never runs them."""
    root = Path(shutil.copytree(rendered / name / host, tmp_path / "root"))
    units = sorted((root / "etc/systemd/system").glob("*.service"))
    assert len(units) >= 3
    for unit in units:
        for path in re.findall(r"(?m)^Exec\w+=[-+!@:]*(/\S+)", unit.read_text()):
            stand_in = root / path.lstrip("/")
            stand_in.parent.mkdir(parents=True, exist_ok=True)
            stand_in.touch(mode=0o755)
    for standard in ("network.target", "network-online.target", "network-pre.target", "multi-user.target"):
        (root / "etc/systemd/system" / standard).write_text(f"[Unit]\nDescription={standard}\n")
    for base in ("basic.target", "sysinit.target", "shutdown.target", "nftables.service", "nginx.service"):
        (root / "etc/systemd/system" / base).write_text(
            f"[Unit]\nDescription={base}\nDefaultDependencies=no\n"
            + ("[Service]\nExecStart=/usr/sbin/nft\n" if base.endswith("service") else "")
        )
    (root / "usr/sbin").mkdir(parents=True, exist_ok=True)
    (root / "usr/sbin/nft").touch(mode=0o755)
    said = run(program("systemd-analyze"), "verify", "--man=no", f"--root={root}", *(unit.name for unit in units))
    assert said == ""


@pytest.mark.parametrize("host", HOSTS)
def test_netplan_accepts_the_rails(rendered, tmp_path, host):
    root = Path(shutil.copytree(rendered / "sparks" / host, tmp_path / "root"))
    for file in (root / "etc/netplan").iterdir():
        file.chmod(0o600)
    run(program("netplan"), "generate", "--root-dir", root)
    profiles = "".join(file.read_text() for file in sorted((root / "run/NetworkManager").rglob("*.nmconnection")))
    number = 11 + HOSTS.index(host)
    for subnet in ("192.168.177", "192.168.178"):
        assert f"address1={subnet}.{number}/24" in profiles
    assert profiles.count("mtu=9000") == 2


@pytest.mark.parametrize("host", HOSTS)
def test_nft_accepts_the_firewall(rendered, host):
    if os.geteuid():
        missing("nft --check needs root")
    run(program("nft"), "--check", "--file", rendered / "sparks" / host / "etc/glm-vllm/fabric.nft")


def test_nginx_accepts_the_gateway(rendered, tmp_path):
    etc = rendered / "sparks/spark-a/etc"
    main = (etc / "nginx/modules-enabled/90-glm-vllm.conf").read_text()
    site = (etc / "nginx/conf.d/glm-vllm.conf").read_text()
    (tmp_path / "keys.map").write_text(f'"~^{"0" * 64}$" "me";\n')  # as `glm-vllm key` writes it
    files = ("-keyout", tmp_path / "server.key", "-out", tmp_path / "server.crt")
    run(program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *files,
        "-subj", "/CN=x")  # fmt: skip
    for folder in ("/etc/nginx/glm-vllm", "/etc/glm-vllm/tls", "/var/log/nginx"):
        site = site.replace(folder, str(tmp_path))
    # Ports below those of the file: `nginx -t` binds them, and a served pair may run on this machine.
    (tmp_path / "site.conf").write_text(re.sub(r"listen (\S*:)?(8888|8443)", r"listen \g<1>1\g<2>", site))
    (tmp_path / "nginx.conf").write_text(
        f"{main}\npid {tmp_path}/pid;\nerror_log {tmp_path}/error.log;\nevents {{}}\n"
        f"http {{\n  access_log off;\n  include {tmp_path}/site.conf;\n}}\n"
    )
    run(program("nginx"), "-t", "-q", "-c", tmp_path / "nginx.conf")


@pytest.mark.parametrize("host", HOSTS)
def test_the_fabric_is_json_for_this_node(rendered, host):
    fabric = json.loads((rendered / "sparks" / host / "etc/glm-vllm/fabric.json").read_text())
    assert fabric["schema"] == 1
    assert fabric["peer"] == next(other for other in HOSTS if other != host)
    assert [rail["mtu"] for rail in fabric["rails"]] == [9000, 9000]


def test_tmpfiles_makes_the_run_time_folder(rendered, tmp_path):
    if os.geteuid():
        missing("giving a folder to another user needs root")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("glm-vllm:x:990:990::/:/bin/false\n")
    (tmp_path / "etc/group").write_text("www-data:x:33:\nglm-vllm:x:990:\n")
    conf = shutil.copy(rendered / "sparks/spark-a/etc/tmpfiles.d/glm-vllm.conf", tmp_path)
    run(program("systemd-tmpfiles"), f"--root={tmp_path}", "--create", conf)
    made = (tmp_path / "run/glm-vllm").stat()
    assert (oct(made.st_mode & 0o7777), made.st_uid, made.st_gid) == ("0o2750", 990, 33)


def test_serve_yaml_is_what_vllm_reads(rendered):
    """No false, null or secret, and every key in the form of the command line."""
    for name in EXECUTORS:
        options = yaml.safe_load((rendered / name / "spark-a/etc/glm-vllm/serve.yaml").read_text())
        assert all(value is not False and value is not None for value in options.values())
        assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", key) for key in options)
        assert "api-key" not in options


# vLLM imports the registry's torchvision, whose compiled half needs CUDA; its operators are declared first.
CHECK = """
import json, sys
from pathlib import Path
from glm_vllm_twin import torchvision_ops
torchvision_ops.declare()
from glm_vllm_overlay.node import check_config
import vllm
found = [check_config.compare(check_config.read_config(Path(file))) for file in sys.argv[1:]]
print(json.dumps([vllm.__file__, *found]))
"""


def test_the_pinned_parser_accepts_serve_yaml(rendered, tmp_path):
    python, vllm = REPOSITORY / ".venv-engine/bin/python", REPOSITORY / ".cache/vllm-0.33.0"
    if not (python.exists() and (vllm / "vllm").exists()):
        missing("no .venv-engine or no .cache/vllm-0.33.0: run make setup")
    said = subprocess.run(
        [python, "-c", CHECK, *(rendered / name / "spark-a/etc/glm-vllm/serve.yaml" for name in EXECUTORS)],
        env=os.environ
        | {"PYTHONPATH": f"{vllm}:{REPOSITORY}/files/overlay/src", "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert said.returncode == 0, said.stderr[-3000:]
    module, *found = json.loads(said.stdout.splitlines()[-1])
    assert module.startswith(str(vllm)), "another vLLM was asked"
    assert found == [[] for _ in EXECUTORS]


# Engine and Ray keep what CUDA, JIT and RDMA need; docs/security.md says what and why.
GUARDED = ("nginx.service", "glm-vllm-watch.service", "glm-vllm-guard.service")
MEASURED = ("glm-vllm-head.service", "ray-head.service")


def exposure(root: Path, unit: str) -> float:
    """What `systemd-analyze security` makes of a unit: 0 is shut, 10 is open."""
    said = run(program("systemd-analyze"), "security", "--offline=true", f"--root={root}", "--no-pager", unit)
    return float(re.search(r"Overall exposure level for \S+: ([\d.]+)", said).group(1))


@pytest.mark.parametrize("name", EXECUTORS)
def test_how_far_the_units_are_open(rendered, tmp_path, name):
    root = Path(shutil.copytree(rendered / name / "spark-a", tmp_path / "root"))
    # The distribution's own unit has no limits: ours stand in the drop-in.
    (root / "etc/systemd/system/nginx.service").write_text("[Service]\nType=forking\nExecStart=/usr/sbin/nginx\n")
    found = {unit: exposure(root, unit) for unit in GUARDED + MEASURED if (root / "etc/systemd/system" / unit).exists()}
    assert {unit: found[unit] for unit in GUARDED if found[unit] >= 4.0} == {}
    version = re.match(r"systemd (\d+)", run(program("systemd-analyze"), "--version")).group(1)
    page = (REPOSITORY / "docs/security.md").read_text()
    recorded = {unit: float(number) for unit, number in re.findall(r"(?m)^\| `(\S+\.service)` \| ([\d.]+) \|", page)}
    assert set(recorded) == {*GUARDED, *MEASURED}
    if version == re.search(r"as systemd (\d+) counts", page).group(1):
        assert found == {unit: recorded[unit] for unit in found}
