# SPDX-License-Identifier: Apache-2.0
"""The footprint: what is recorded, that the first record wins, and that undo is exact."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

MODULE = Path(__file__).parents[2] / "plugins" / "modules" / "footprint.py"
spec = importlib.util.spec_from_file_location("footprint", MODULE)
footprint = importlib.util.module_from_spec(spec)
spec.loader.exec_module(footprint)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "var" / "glm-vllm"


def run(root: Path, kind: str, *names: Any, check: bool = False, **more: Any) -> dict[str, Any]:
    params = {
        "role": "test",
        "kind": kind,
        "name": [str(n) for n in names],
        "backup": False,
        "data": {},
        "state": "present",
        "keep": [],
        "root": str(root),
        **more,
    }
    return footprint.apply(params, check)


def stored(root: Path) -> list[dict[str, Any]]:
    content = json.loads((root / "footprint.json").read_text())
    assert content["schema"] == 1
    return content["records"]


def test_new_file_is_recorded_and_removed(root: Path, tmp_path: Path) -> None:
    unit = tmp_path / "x.service"
    assert run(root, "file", unit)["changed"]
    unit.write_text("ours")
    assert not run(root, "file", unit)["changed"]
    assert run(root, "file", unit, state="absent")["changed"]
    assert not unit.exists()
    assert not run(root, "file", unit, state="absent")["changed"]
    assert all(r["name"] != str(unit) for r in stored(root))


def test_existing_file_comes_back_byte_for_byte(root: Path, tmp_path: Path) -> None:
    fstab = tmp_path / "fstab"
    fstab.write_bytes(b"UUID=1 / ext4\n/swap.img none swap sw 0 0")
    fstab.chmod(0o640)
    record = run(root, "file", fstab, backup=True)["records"][0]
    assert record["before"]["mode"] == "0640"
    fstab.write_bytes(b"changed")
    fstab.chmod(0o644)
    run(root, "file", fstab, backup=True)  # a second run must not take our own content for the pre-image
    run(root, "file", fstab, state="absent")
    assert fstab.read_bytes() == b"UUID=1 / ext4\n/swap.img none swap sw 0 0"
    assert fstab.stat().st_mode & 0o7777 == 0o640


def test_backup_folder_is_private(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "keys"
    secret.write_text("k")
    secret.chmod(0o600)
    run(root, "file", secret, backup=True)
    assert (root / "backup").stat().st_mode & 0o777 == 0o700
    assert (root / "backup" / str(secret).lstrip("/")).stat().st_mode & 0o777 == 0o600


def test_existing_file_without_backup_is_left(root: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.write_text("theirs")
    run(root, "file", shared)
    shared.write_text("newer")
    run(root, "file", shared, state="absent")
    assert shared.read_text() == "newer"


def test_symlink_is_put_back(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "default.target"
    link.symlink_to("graphical.target")
    run(root, "symlink", link)
    link.unlink()
    link.symlink_to("multi-user.target")
    run(root, "symlink", link, state="absent")
    assert os.readlink(link) == "graphical.target"


def test_new_symlink_is_removed_and_its_target_is_not(root: Path, tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir()
    run(root, "symlink", link)
    link.symlink_to(target)
    run(root, "symlink", link, state="absent")
    assert not link.is_symlink() and target.is_dir()


def test_existing_dir_is_never_removed(root: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "nginx"
    theirs.mkdir()
    run(root, "dir", theirs)
    run(root, "dir", theirs, state="absent")
    assert theirs.is_dir()


def test_first_use_records_its_own_folder_first(root: Path, tmp_path: Path) -> None:
    run(root, "file", tmp_path / "a")
    assert [(r["kind"], r["name"]) for r in stored(root)] == [("dir", str(root)), ("file", str(tmp_path / "a"))]


def test_nothing_to_record_makes_no_folder_that_nothing_would_remove(root: Path, tmp_path: Path) -> None:
    run(root, "package")
    assert not root.exists()
    run(root, "dir", tmp_path / "new")
    assert stored(root)[0]["name"] == str(root)


def test_kept_weights_keep_the_record_that_removes_them_later(root: Path, tmp_path: Path) -> None:
    run(root, "file", tmp_path / "a")
    weights = root / "models" / "glm" / "rev"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_text("w")
    (root / "deployments").mkdir()
    assert run(root, "dir", root, state="absent", keep=[str(root / "models")])["changed"]
    assert (weights / "model.safetensors").exists() and not (root / "deployments").exists()
    assert footprint.Footprint(root).find("dir", str(root))
    assert not run(root, "dir", root, state="absent", keep=[str(root / "models")])["changed"]
    assert run(root, "dir", root, state="absent")["changed"]
    assert not root.exists()


def test_check_mode_writes_nothing(root: Path, tmp_path: Path) -> None:
    result = run(root, "file", tmp_path / "a", check=True)
    assert result["changed"] and result["diff"]["after"] == f"file {tmp_path / 'a'}\n"
    assert not root.exists()
    file = tmp_path / "b"
    run(root, "file", file)
    file.write_text("ours")
    result = run(root, "file", file, state="absent", check=True)
    assert result["changed"] and result["diff"]["before"] == f"file {file}\n"
    assert file.exists() and len(stored(root)) == 2


def test_packages_know_whether_they_were_there(root: Path) -> None:
    records = run(root, "package", "dpkg", "no-such-package-of-ours")["records"]
    assert [r["before"] for r in records] == [{"installed": True}, {"installed": False}]


def test_other_kinds_capture_what_uninstall_needs(root: Path) -> None:
    assert run(root, "hold", "dpkg")["records"][0]["before"] == {"selection": "install"}
    assert run(root, "user", "root", "glm-nobody")["records"][1]["before"] == {"exists": False}
    assert run(root, "sysctl", "kernel.ostype")["records"][0]["before"] == {"value": "Linux"}
    assert run(root, "unit", "no-such.service")["records"][0]["before"]["enabled"] == "not-found"
    data = {"active": True, "unit": ""}
    assert run(root, "swap", "/swap.img", data=data)["records"][0]["data"] == data


def test_foreign_schema_is_refused(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "footprint.json").write_text('{"schema": 2, "records": []}')
    with pytest.raises(ValueError, match="schema 2"):
        run(root, "file", "/x")


def test_listed_is_newest_first_and_works_before_there_is_anything(root: Path, tmp_path: Path) -> None:
    assert run(root, "file", state="listed")["kinds"]["package"] == []
    run(root, "file", tmp_path / "a", tmp_path / "b")
    kinds = run(root, "file", state="listed")["kinds"]
    assert [Path(r["name"]).name for r in kinds["file"]] == ["b", "a"]
    assert [r["name"] for r in kinds["dir"]] == [str(root)]
