# SPDX-License-Identifier: Apache-2.0
"""What a bundle is made of, and what is wrong with one: the sums, the locks, the weights, the packages."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[3]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bundled_{Path(path).stem}", ROOT / "plugins" / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


parts, wheels, packages = load("controller/bundle.py"), load("modules/bundle_wheels.py"), load("modules/bundle_apt.py")


def wheel(folder: Path, name: str, *metadata: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA", "\n".join((f"Name: {name}", "Version: 1.0", *metadata)) + "\n"
        )
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / "uv.txt"
    file.write_text("one==1.0 \\\n    --hash=sha256:0\n")
    return file


@pytest.fixture
def whole(tmp_path: Path, lock: Path) -> Path:
    top = tmp_path / "bundle"
    wheel(top / "wheels", "one", "License: MIT")
    (top / "apt").mkdir()
    (top / "apt/Packages").write_text("")
    (top / "weights/tiny/0").mkdir(parents=True)
    (top / "weights/tiny/0/a.safetensors").write_bytes(b"a")
    document = {"schema": 1, "profile": "gb10", "locks": {"uv.txt": parts.digest(lock)}, "weights": None}
    (top / "bundle.json").write_text(json.dumps(document))
    parts.seal(top)
    return top


def test_a_whole_one_is_taken_and_sha256sum_agrees(whole: Path, lock: Path) -> None:
    assert parts.check(whole, "gb10", {"uv.txt": lock})["profile"] == "gb10"
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=whole, check=True)


def test_what_python_leaves_beside_its_sources_is_no_harm(whole: Path, lock: Path) -> None:
    """The bundle's own project runs from it: its plugins are compiled there."""
    (whole / "project/plugins/__pycache__").mkdir(parents=True)
    (whole / "project/plugins/__pycache__/a.pyc").touch()
    assert parts.check(whole, "gb10", {"uv.txt": lock})["profile"] == "gb10"


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda top: (top / "apt/Packages").write_text("x"), "{top}/apt/Packages is not what SHA256SUMS says: "),
        (lambda top: (top / "apt/Packages").unlink(), "{top}/apt/Packages is missing: copy the bundle again"),
        (
            lambda top: (top / "apt/z.deb").touch(),
            "{top}/apt/z.deb is no part of the bundle (SHA256SUMS does not name it)",
        ),
        (
            lambda top: (top / "weights/tiny/0/a.safetensors").unlink(),
            "{top}/weights/tiny/0/a.safetensors is missing: ",
        ),
        (lambda top: (top / "SHA256SUMS").unlink(), "{top} is no whole bundle, for it has no readable SHA256SUMS"),
        (lambda top: (top / "SHA256SUMS").write_text("rubbish\n"), "{top} is no whole bundle"),
    ],
)
def test_a_spoilt_one_is_refused_by_name(whole: Path, lock: Path, harm, sentence: str) -> None:
    harm(whole)
    with pytest.raises(parts.Spoilt) as refused:
        parts.check(whole, "gb10", {"uv.txt": lock})
    assert str(refused.value).startswith(sentence.format(top=whole))
    assert str(refused.value).endswith(".")


def test_one_for_something_else_is_refused(whole: Path, lock: Path) -> None:
    with pytest.raises(parts.Spoilt, match="made for the profile gb10, and this inventory is of twin"):
        parts.check(whole, "twin", {"uv.txt": lock})
    lock.write_text("one==2.0\n")
    with pytest.raises(
        parts.Spoilt, match=r"another files/locks/uv\.txt than this project's: run site\.yml from .*/project"
    ):
        parts.check(whole, "gb10", {"uv.txt": lock})


def test_weights_are_not_read_again_by_every_run(whole: Path, lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(parts, "digest", lambda file, real=parts.digest: read.append(file.name) or real(file))
    parts.check(whole, "gb10", {"uv.txt": lock})
    assert "Packages" in read
    assert "a.safetensors" not in read


def test_the_project_is_whole_and_holds_no_inventory(tmp_path: Path) -> None:
    parts.own_parts(tmp_path, ROOT)
    assert not (tmp_path / "project/inventory").exists()
    done = subprocess.run(
        [sys.executable, "-m", "ansible", "playbook", "--syntax-check", f"-i{ROOT}/inventory/sparks", "site.yml"],
        cwd=tmp_path / "project", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "licences/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_what_the_wheels_say_of_their_licence(tmp_path: Path) -> None:
    wheel(tmp_path, "a", "License-Expression: Apache-2.0", "License: long text")
    wheel(tmp_path, "b", "Classifier: License :: OSI Approved :: MIT License")
    wheel(tmp_path, "c", "License: BSD")
    wheel(tmp_path, "d")
    assert parts.licences_of(tmp_path) == "a 1.0: Apache-2.0\nb 1.0: MIT License\nc 1.0: BSD\nd 1.0: not named\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "glm5_next"}')
    (folder / "a.safetensors").write_bytes(b"a" * 100)
    files = {name: {"size": 1, "sha256": parts.digest(folder / name)} for name in ("config.json", "a.safetensors")}
    (folder / "manifest.json").write_text(json.dumps({"name": "tiny", "revision": "0" * 40, "files": files}))
    return folder


def test_weights_come_proved_and_alone(tmp_path: Path, model: Path) -> None:
    top = tmp_path / "bundle"
    (top / "weights/older/1").mkdir(parents=True)
    manifest = parts.weights_of(model)
    parts.bring_weights(top, model, manifest)
    assert (top / "weights/tiny" / ("0" * 40) / "manifest.json").exists()
    assert not (top / "weights/older/1").exists()
    (model / "a.safetensors").write_bytes(b"b" * 100)
    parts.bring_weights(top, model, manifest)  # what is right there stays
    (top / "weights/tiny" / ("0" * 40) / "a.safetensors").write_bytes(b"torn")  # and what is not is brought anew
    with pytest.raises(parts.Spoilt, match=r"a\.safetensors is not what its manifest\.json says"):
        parts.bring_weights(top, model, manifest)
    assert not (top / "weights/tiny" / ("0" * 40) / "a.safetensors").exists()


def test_a_drafter_is_never_handed_on(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(parts.Spoilt, match="model_type is qwen3 and not glm5_next: a drafter is never handed on"):
        parts.weights_of(model)


# ---- wheels ---------------------------------------------------------------------------------------------------------


def test_wheels_that_no_lock_names_go(tmp_path: Path, lock: Path) -> None:
    lock.write_text("# one\none-part==1.0 \\\n    --hash=sha256:0\ntorch==2.13.0+cpu ; sys_platform == 'linux' \\\n")
    for name in (
        "one_part-1.0-py3-none-any",
        "One.Part-1.1-py3-none-any",
        "torch-2.13.0+cpu-cp311-cp311-linux_x86_64",
        "other-1.0-py3-none-any",
    ):
        (tmp_path / f"{name}.whl").touch()
    assert [path.name for path in wheels.stray(tmp_path, wheels.named([lock]))] == [
        "One.Part-1.1-py3-none-any.whl",
        "other-1.0-py3-none-any.whl",
    ]


def test_pip_takes_them_for_another_processor(tmp_path: Path) -> None:
    """Fails when pip would bring wheels of this machine: it is asked for one that only aarch64 could install."""
    source = tmp_path / "source"
    source.mkdir()
    name = "one-1.0-cp312-cp312-manylinux_2_28_aarch64.whl"
    wheel(source, "one")
    (source / "one-1.0-py3-none-any.whl").rename(source / name)
    lock = tmp_path / "lock.txt"
    lock.write_text(f"one==1.0 --hash=sha256:{hashlib.sha256((source / name).read_bytes()).hexdigest()}\n")
    asked = {"dest": tmp_path / "dest", "locks": [lock], "python": "3.12", "machine": "aarch64", "glibc": 39}
    subprocess.run([*wheels.command(asked | {"find_links": [source]}), "--no-index"], check=True, capture_output=True)
    assert [path.name for path in (tmp_path / "dest").iterdir()] == [name]
    shutil.rmtree(tmp_path / "dest")
    asked["machine"] = "x86_64"
    done = subprocess.run(
        [*wheels.command(asked | {"find_links": [source]}), "--no-index"], check=False, capture_output=True
    )
    assert done.returncode != 0


# ---- packages of apt ------------------------------------------------------------------------------------------------


def deb(folder: Path, name: str, version: str, needs: str, machine: str = "arm64") -> None:
    """A real package without a file, in a folder that apt can read."""
    top = folder / f"{name}.d"
    (top / "DEBIAN").mkdir(parents=True)
    text = f"Package: {name}\nVersion: {version}\nArchitecture: {machine}\nMaintainer: nobody <n@example.org>\n"
    (top / "DEBIAN/control").write_text(
        f"{text}Depends: {needs}\nDescription: none\n" if needs else f"{text}Description: none\n"
    )
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", top, folder], check=True, capture_output=True)
    shutil.rmtree(top)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    folder = tmp_path / "mirror"
    folder.mkdir()
    deb(folder, "tool", "1:2.0-1", "library (>= 3)")
    deb(folder, "library", "3.1", "")
    deb(folder, "stranger", "1", "")
    scanned = subprocess.run(["dpkg-scanpackages", "-m", "."], cwd=folder, check=True, capture_output=True, text=True)
    (folder / "Packages").write_text(scanned.stdout)
    (tmp_path / "nodes.list").write_text(f"deb [trusted=yes] file:{folder} ./\n")
    return folder


def bring(dest: Path, sources: Path, *names: str) -> dict:
    """The module as Ansible runs it."""
    given = {"dest": str(dest), "packages": list(names), "architecture": "arm64", "sources": str(sources)}
    argument = json.dumps({"ANSIBLE_MODULE_ARGS": given})
    done = subprocess.run(
        [sys.executable, str(ROOT / "plugins/modules/bundle_apt.py")],
        input=argument,
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout)


def test_packages_come_with_what_they_need_and_apt_takes_them_from_the_folder(tmp_path: Path, mirror: Path) -> None:
    dest = tmp_path / "apt"
    first = bring(dest, tmp_path / "nodes.list", "tool")
    assert first["changed"], first
    assert (
        sorted(path.name for path in dest.glob("*.deb"))
        == ["library_3.1_arm64.deb", "tool_1%3a2.0-1_arm64.deb"]
        == first["files"]
    )
    assert not bring(dest, tmp_path / "nodes.list", "tool")["changed"]
    # the folder as the only source there is
    shutil.rmtree(mirror)
    (tmp_path / "own.list").write_text(f"deb [trusted=yes] file:{dest} ./\n")
    assert bring(tmp_path / "again", tmp_path / "own.list", "tool")["files"] == first["files"]
    (dest / "library_3.1_arm64.deb").write_bytes(b"spoilt")
    assert "apt cannot bring" in bring(tmp_path / "third", tmp_path / "own.list", "tool")["msg"]


def test_a_package_that_is_no_longer_wanted_goes(tmp_path: Path, mirror: Path) -> None:
    dest = tmp_path / "apt"
    bring(dest, tmp_path / "nodes.list", "tool", "stranger")
    assert bring(dest, tmp_path / "nodes.list", "tool")["changed"]
    assert not (dest / "stranger_1_arm64.deb").exists()


@pytest.mark.parametrize(
    ("sources", "sentence"),
    [
        ("nodes.txt", "apt reads files that end with .list or .sources."),
        ("absent.list", "which is no file: correct the path."),
        ("nodes.list", "correct bundle_apt_sources"),
    ],
)
def test_sources_that_cannot_be_used(tmp_path: Path, mirror: Path, sources: str, sentence: str) -> None:
    assert sentence in bring(tmp_path / "apt", tmp_path / sources, "no-such-package")["msg"]
    assert not (tmp_path / "apt").exists()


def test_the_packages_are_those_that_the_roles_install() -> None:
    """Fails when a role installs a package that the table of playbooks/vars/bundle.yml lacks, for either profile."""
    table = yaml.safe_load((ROOT / "playbooks/vars/bundle.yml").read_text())["__bundle"]
    overlay = ROOT / "roles/glm-vllm-overlay"
    for profile, facts in table.items():
        vars_ = (overlay / f"vars/main/{profile}.yml").read_text()
        wanted = set(yaml.safe_load(vars_)[f"__glm_vllm_overlay_{profile}"]["packages"])
        tasks = "\n".join(f.read_text() for f in ROOT.glob("roles/*/tasks/*.yml"))
        for names in re.findall(r"builtin\.apt:\n(?:    .*\n|      .*\n)*?\s+name: \[([^\]]+)\]", tasks):
            wanted |= {name.strip() for name in names.split(",")}
        cuda = yaml.safe_load((ROOT / "roles/cuda-sm121/vars/main.yml").read_text())["__cuda_sm121_packages"]
        wanted |= {name.replace("{{ __cuda_sm121_facts.python }}", facts["python"]) for name in cuda}
        network = yaml.safe_load((ROOT / "roles/cx7-network/vars/main.yml").read_text())["__cx7_network_packages"]
        wanted |= set(re.findall(r"'([a-z0-9-]{5,})'", network)) - {"auto"}
        assert {"nginx", "openssl", "curl", "rsync", "g++", "nftables", "perftest"} <= wanted, (
            "the roles are not read rightly"
        )
        assert wanted <= set(facts["packages"]), f"{profile} lacks {sorted(wanted - set(facts['packages']))}"
        for lock in facts["locks"]:
            assert (ROOT / "files/locks" / lock).exists()
