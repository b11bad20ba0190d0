# SPDX-License-Identifier: Apache-2.0
"""Choosing, staging and verifying a model; the hub is a fake module, the files are real."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from pathlib import Path

import pytest

REVISION = "0" * 40


def source(**more):
    return {"repo": None, "path": None, "revision": None, "licence": "none", "name": None, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    top = tmp_path / "tiny"
    (top / "sub").mkdir(parents=True)
    (top / "config.json").write_text("{}")
    (top / "sub/a.bin").write_bytes(b"a" * 1000)
    (top / ".cache").mkdir()
    (top / ".cache/x").write_text("hidden")
    return top


@pytest.fixture
def hub(monkeypatch):
    """A hub whose one repository lists config.json (a git blob) and a.bin (LFS)."""

    def model_info(self, repo, **more):
        if repo == "gone/gone":
            raise RuntimeError("404 Not Found\nlong")
        lfs = types.SimpleNamespace(sha256="f" * 64)
        files = [
            ("config.json", 2, "b" * 40, None),
            ("a.bin", 1000, "c" * 40, lfs),
            (".gitattributes", 1, "d" * 40, None),
        ]
        keys = ("rfilename", "size", "blob_id", "lfs")
        return types.SimpleNamespace(siblings=[types.SimpleNamespace(**dict(zip(keys, f, strict=True))) for f in files])

    api = type("HfApi", (), {"__init__": lambda self, token=None: None, "model_info": model_info})
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=api))


def test_the_first_usable_source_wins(plugin, folder, tmp_path):
    module = plugin("modules/model_source.py")
    chosen, files, reasons = module.choose([source(path="/absent"), source(path=str(folder))], tmp_path, "", False)
    assert (chosen["name"], len(chosen["revision"])) == ("tiny", 40)
    assert {name: entry["size"] for name, entry in files.items()} == {"config.json": 2, "sub/a.bin": 1000}
    assert reasons == ["/absent is not a folder on this node."]


def test_a_folder_without_revision_gets_one_that_follows_its_files(plugin, folder, tmp_path):
    module = plugin("modules/model_source.py")
    first = module.from_folder(source(path=str(folder)))[0]
    assert module.from_folder(source(path=str(folder)))[0] == first
    (folder / "sub/a.bin").write_bytes(b"b" * 1001)
    assert module.from_folder(source(path=str(folder)))[0] != first


def test_a_repository_that_is_gone_is_passed_over(plugin, hub, tmp_path):
    wanted = [source(repo="gone/gone", revision=REVISION), source(repo="own/model", revision=REVISION)]
    chosen, files, reasons = plugin("modules/model_source.py").choose(wanted, tmp_path, "", False)
    assert chosen["name"] == "model"
    assert files["a.bin"] == {"size": 1000, "sha256": "f" * 64, "blob": None}
    assert files["config.json"]["blob"] == "b" * 40
    assert ".gitattributes" not in files
    assert reasons == ["gone/gone@00000000 cannot be listed: 404 Not Found"]


def test_offline_uses_only_what_is_verified_here(plugin, tmp_path):
    module = plugin("modules/model_source.py")
    wanted = [source(repo="own/model", revision=REVISION)]
    assert module.choose(wanted, tmp_path, "", True)[0] is None
    here = tmp_path / "model" / REVISION
    here.mkdir(parents=True)
    text = json.dumps({"files": {"config.json": {"size": 2, "sha256": "e" * 64}}})
    (here / "manifest.json").write_text(text)
    (here / ".verified.json").write_text(json.dumps({"manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}))
    assert module.choose(wanted, tmp_path, "", True)[1]["config.json"]["size"] == 2
    (here / "manifest.json").write_text(text + " ")
    assert module.choose(wanted, tmp_path, "", True)[0] is None


def manifest(top: Path) -> dict:
    files = {
        str(p.relative_to(top)): {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in top.rglob("*")
        if p.is_file() and ".cache" not in p.parts
    }
    return {"schema": 1, "name": "tiny", "revision": REVISION, "files": files}


def test_a_second_reading_reads_nothing(plugin, folder):
    module = plugin("modules/model_verify.py")
    wanted = manifest(folder)
    model = module.Model(folder, wanted)
    reasons, digests = model.verify()
    assert (reasons, model.bytes_read) == ({}, 1002)
    module.dump(folder / module.DIGESTS, {"files": digests})
    again = module.Model(folder, wanted)
    assert again.verify()[0] == {}
    assert again.bytes_read == 0


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda file: file.unlink(), "sub/a.bin is missing."),
        (lambda file: os.truncate(file, 999), "sub/a.bin has 999 bytes instead of 1000."),
        (lambda file: file.write_bytes(b"a" * 999 + b"b"), "sub/a.bin has other content than its SHA-256 says."),
        (lambda file: (file.rename(file.parent / "b"), file.symlink_to("b")), "sub/a.bin is no plain file."),
    ],
)
def test_damage_is_found_also_after_a_good_reading(plugin, folder, damage, sentence):
    module = plugin("modules/model_verify.py")
    wanted = manifest(folder)
    module.dump(folder / module.DIGESTS, {"files": module.Model(folder, wanted).verify()[1]})
    damage(folder / "sub/a.bin")
    assert module.Model(folder, wanted).verify()[0] == {"sub/a.bin": sentence}


def test_copying_keeps_time_and_tells_what_was_read(plugin, folder, tmp_path):
    module = plugin("modules/model_stage.py")
    origin, target = folder / "sub/a.bin", tmp_path / "out/sub/a.bin"
    target.parent.mkdir(parents=True)
    os.utime(origin, (1000, 1000))
    assert module.copy(origin, target, tmp_path / "out/.partial") == hashlib.sha256(b"a" * 1000).hexdigest()
    entry = {"size": 1000}
    assert module.kept(tmp_path / "out", "sub/a.bin", entry, origin)
    os.utime(target, (2000, 2000))
    assert not module.kept(tmp_path / "out", "sub/a.bin", entry, origin)
    assert module.kept(tmp_path / "out", "sub/a.bin", entry, None)


def test_git_blob(plugin, tmp_path):
    (tmp_path / "f").write_bytes(b"hello\n")
    assert plugin("modules/model_stage.py").git_blob(tmp_path / "f") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_what_is_here_in_part_counts_as_present(plugin, folder):
    module = plugin("modules/model_room.py")
    files = {"config.json": {"size": 2}, "sub/a.bin": {"size": 1000}, "b.bin": {"size": 500}}
    assert module.present(folder, files) == 1002 + len("hidden")
    assert module.present(folder / "absent", files) == 0
    assert module.free(folder / "absent" / "deeper") > 0


def test_the_transfer_names_its_files_and_hides_its_secret(plugin):
    command = plugin("modules/model_pull.py").command("/m", "192.168.177.11", 8730, "/t/names", "/t/password")
    assert "--files-from=/t/names" in command
    assert command[-2:] == ["rsync://glm-vllm@192.168.177.11/model/", "/m/"]
    assert "--ignore-times" in command  # a rotten file has the right size and perhaps the right time


def test_licences(plugin):
    module = plugin("filter/model.py")
    free, bound = source(path="/x"), source(repo="a/b", revision=REVISION, licence="ShapleyMCG-1.0")
    assert module.model_licensed([free, bound], []) == [free]
    assert module.model_refused([free, bound], []) == ["ShapleyMCG-1.0 (a/b@00000000)"]
    assert module.model_refused([free, bound], ["ShapleyMCG-1.0"]) == []
    assert module.model_entry(None) is None
