# SPDX-License-Identifier: Apache-2.0
"""Verifying a model, and bringing it from what is no hub: folders, caches, an HTTP server, an rsync daemon."""

from __future__ import annotations

import functools
import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from glm_vllm_overlay.cli import main
from glm_vllm_overlay.node import carrier, fetch, model, sources, verify
from glm_vllm_overlay.node.errors import Refusal, Unusable

REVISION = "0" * 40
SHARD = "sub/a.safetensors"


def source(**more):
    return {"repo": None, "path": None, "url": None, "revision": None, "licence": "none", "name": None, **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model that lies there as its makers left it."""
    top = tmp_path / "tiny"
    (top / "sub").mkdir(parents=True)
    (top / "config.json").write_text("{}")
    (top / SHARD).write_bytes(b"a" * 1000)
    (top / "b.safetensors").write_bytes(b"b" * 500)
    (top / ".cache").mkdir()
    (top / ".cache/x").write_text("hidden")
    return top


def listed(top: Path, **more) -> dict:
    """The model of a folder as the files of a job."""
    return {
        str(p.relative_to(top)): {
            "size": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
            **more,
        }
        for p in top.rglob("*")
        if p.is_file() and p.name != "manifest.json" and not any(x.startswith(".") for x in p.relative_to(top).parts)
    }


def job(folder: Path, target: Path, *origins: dict, **more) -> dict:
    wanted = {"name": "tiny", "revision": REVISION, "folder": str(target), "files": listed(folder)}
    return wanted | {"origins": list(origins), "reserve": 0, "streams": 2, "backoff": 0.01} | more


def run(document: dict) -> dict:
    return fetch.Fetch(document, None).run()


def same(folder: Path, target: Path) -> bool:
    """Equal content, a flag that holds, and nothing that is still arriving."""
    return listed(folder) == listed(target) and not model.changed_since_verified(target) and not partial(target)


def partial(target: Path) -> bool:
    return (target / ".partial").exists()


@pytest.fixture
def here(folder, tmp_path) -> Path:
    """The model in a node's own folder, verified."""
    run(job(folder, tmp_path / "here", {"path": str(folder)}))
    return tmp_path / "here"


# ---- verify ---------------------------------------------------------------------------------------------------------


def test_a_second_reading_reads_nothing(here, capsys):
    assert main(["verify", "--json", "--full", str(here)]) == 0
    (full,) = json.loads(capsys.readouterr().out)["models"]
    assert (full["files_read"], full["bytes_read"], full["changed"]) == (3, 1502, False)
    assert main(["verify", "--json", str(here)]) == 0
    (again,) = json.loads(capsys.readouterr().out)["models"]
    assert (again["files"], again["bytes_read"], again["changed"]) == (3, 0, False)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda file: file.unlink(), f"{SHARD} is missing"),
        (lambda file: os.truncate(file, 999), f"{SHARD} has 999 bytes instead of 1000"),
        (lambda file: file.write_bytes(b"a" * 999 + b"b"), f"{SHARD} has other content than its SHA-256 says"),
        (lambda file: (file.rename(file.parent / "b"), file.symlink_to("b")), f"{SHARD} is no plain file"),
    ],
)
def test_damage_is_named_and_takes_the_flag_away(here, damage, sentence, capsys):
    damage(here / SHARD)
    assert model.changed_since_verified(here)
    assert main(["verify", str(here)]) == 1
    assert f"{sentence}; playbooks/weights.yml brings it anew" in capsys.readouterr().out
    assert not (here / model.FLAG).exists()
    assert main(["verify", str(here)]) == 1, "a wrong file was believed when it was looked at again"


def rot(file: Path) -> None:
    """Change a byte as a disk does it: same size, time and inode."""
    stat = file.stat()
    with file.open("r+b") as handle:
        handle.write(b"!")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_rot_is_found_by_reading_all_and_repaired_alone(folder, here, capsys):
    rot(here / SHARD)
    assert main(["verify", str(here)]) == 0
    assert main(["verify", "--full", str(here)]) == 1
    answer = run(job(folder, here, {"path": str(folder)}))
    assert list(answer["found_wrong"]) == answer["brought"] == [SHARD]
    assert same(folder, here)


def test_the_page_cache_is_given_back(tmp_path):
    """Half of a file that is read is not in memory afterwards; `fincore` tells."""
    file = tmp_path / "big"
    file.write_bytes(os.urandom(8 << 20))
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    resident = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(file)]
    before = int(subprocess.run(resident, capture_output=True, text=True, check=True).stdout)
    model.read(file)
    after = int(subprocess.run(resident, capture_output=True, text=True, check=True).stdout)
    assert before == 8 << 20
    assert after < 1 << 20


def test_files_are_read_side_by_side(here, monkeypatch):
    together = threading.Barrier(2, timeout=5)
    monkeypatch.setattr(model, "read", lambda *_: (together.wait(), "", "")[1:])
    wanted = {name: entry | {"blob": None} for name, entry in listed(here).items() if entry["size"] >= 500}
    assert len(model.Model(here, full=True).check(wanted).wrong) == 2  # the barrier broke nobody's wait


def test_what_the_gate_asks_takes_no_time(here, monkeypatch):
    monkeypatch.setattr(model, "read", lambda *_: pytest.fail("the gate read the weights"))
    began = time.monotonic()
    assert model.changed_since_verified(here) == ""
    assert time.monotonic() - began < 0.1
    os.utime(here / SHARD, (1, 1))
    assert model.changed_since_verified(here) == f"{SHARD} has changed since it was verified"


def test_the_folders_that_are_served(here, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GLM_ROOT", str(tmp_path))
    assert main(["verify"]) == 2
    (tmp_path / "etc/glm-vllm").mkdir(parents=True)
    weights = {"schema": 1, "target": {"path": str(here)}, "drafter": None, "speculator": "mtp"}
    (tmp_path / "etc/glm-vllm/weights.json").write_text(json.dumps(weights))
    assert main(["verify"]) == 0
    assert f"{here}: 3 files right" in capsys.readouterr().out


# ---- manifests ------------------------------------------------------------------------------------------------------


def test_a_manifest_of_a_folder(folder, tmp_path, capsys):
    output = tmp_path / "manifests/tiny" / f"{REVISION}.json"
    assert main(["manifest", str(folder), "--revision", REVISION, "--output", str(output)]) == 0
    document = json.loads(output.read_text())
    assert (document["name"], document["revision"]) == ("tiny", REVISION)
    assert document["files"] == listed(folder)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "names no files: this revision is empty"),
        ({"config.json": {"size": 2}}, "holds no weights"),
        ({"a.safetensors": {"size": 2}}, "holds no config.json"),
        ({"config.json": {"size": 2}, "../a": {"size": 1}}, "names '../a', which does not belong"),
        ({"config.json": {"size": 2}, ".lock": {"size": 1}}, "names '.lock', which does not belong"),
        ({"config.json": {"size": None}}, "has no usable size"),
    ],
)
def test_lists_that_are_refused(files, sentence):
    with pytest.raises(Unusable, match=re.escape(sentence)):
        model.checked_files(files, "it")


# ---- choosing -------------------------------------------------------------------------------------------------------


def test_the_first_usable_source_wins(folder, tmp_path):
    chosen = sources.choose(
        {"sources": [source(path="/absent"), source(path=str(folder))], "dir": str(tmp_path / "models")}
    )
    assert (chosen["source"]["name"], len(chosen["source"]["revision"])) == ("tiny", 40)
    assert {name: entry["size"] for name, entry in chosen["files"].items()} == {
        "config.json": 2,
        SHARD: 1000,
        "b.safetensors": 500,
    }
    assert chosen["passed_over"] == ["/absent is not a folder on this node"]
    with pytest.raises(Refusal, match="no source of the model can be used: /absent is not a folder on this node"):
        sources.choose({"sources": [source(path="/absent")], "dir": str(tmp_path)})


def test_a_folder_without_revision_gets_one_that_follows_its_files(folder):
    first, again = source(path=str(folder)), source(path=str(folder))
    sources.from_folder(first)
    sources.from_folder(again)
    assert first == again
    (folder / SHARD).write_bytes(b"b" * 1001)
    sources.from_folder(changed := source(path=str(folder)))
    assert changed["revision"] != first["revision"]


def test_a_folder_is_held_to_the_manifest_in_it(folder, tmp_path):
    main(["manifest", str(folder), "--revision", REVISION, "--output", str(folder / "manifest.json")])
    given = source(path=str(folder))
    assert sources.from_folder(given)[SHARD]["sha256"]
    assert given["revision"] == REVISION
    (folder / SHARD).unlink()
    with pytest.raises(Unusable, match=f"holds no whole {SHARD}, which its manifest.json names"):
        sources.from_folder(source(path=str(folder)))


def test_offline_uses_only_what_is_here(folder, tmp_path):
    wanted = {"sources": [source(repo="own/tiny", revision=REVISION)], "dir": str(tmp_path / "models"), "offline": True}
    with pytest.raises(Refusal, match="own/tiny@00000000 is not complete here, and model_fetch_offline is true"):
        sources.choose(wanted)
    here = tmp_path / "models/tiny" / REVISION
    run(job(folder, here, {"path": str(folder)}))
    chosen = sources.choose(wanted)
    assert (chosen["files"]["config.json"]["size"], chosen["origins"]) == (2, [])
    (here / model.MANIFEST).write_text("{}")
    with pytest.raises(Refusal):
        sources.choose(wanted)
    ours = {"manifests": {f"tiny/{REVISION}": {"files": listed(folder)}}}
    assert set(sources.choose(wanted | ours)["files"]) == set(listed(folder)), "a disk can be taken by our own list"


# ---- what the machine has elsewhere ---------------------------------------------------------------------------------


@pytest.fixture
def cache(folder, tmp_path) -> Path:
    """The same model as the hub's client keeps it: blobs by hash, a snapshot of links."""
    top = tmp_path / "home/me/.cache/huggingface/hub/models--own--tiny"
    (top / "blobs").mkdir(parents=True)
    for name, entry in listed(folder).items():
        data = (folder / name).read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        blob = entry["sha256"] if name.endswith(".safetensors") else git
        (top / "blobs" / blob).write_bytes(data)
        link = top / "snapshots" / REVISION / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(top / "blobs" / blob, link.parent))
    return top.parent


def test_a_clients_cache_is_adopted_without_copying(folder, cache, tmp_path):
    pattern = str(tmp_path / "home/*/.cache/huggingface/hub")
    given = source(repo="own/tiny", revision=REVISION)
    chosen = sources.choose({"sources": [given], "dir": str(tmp_path), "offline": True, "caches": [pattern]})
    assert chosen["files"][SHARD]["sha256"]
    assert chosen["files"]["config.json"]["blob"]
    target = tmp_path / "models"
    plan = fetch.Fetch(job(folder, target, files=chosen["files"], adopt=[pattern]), None).foretell()
    assert (plan["room"]["adoptable"], plan["room"]["missing"]) == (1502, 0)
    answer = run(job(folder, target, files=chosen["files"], adopt=[pattern]))
    assert (answer["adopted"], answer["brought"]) == (sorted(listed(folder)), [])
    assert same(folder, target)
    blob = next(cache.glob(f"models--own--tiny/blobs/{chosen['files'][SHARD]['sha256']}"))
    shared = (target / SHARD).stat().st_ino == blob.stat().st_ino
    assert shared or carrier.clone(blob, tmp_path / "clone"), "it was copied"


def test_a_cache_with_a_broken_file_gives_the_others(folder, cache, tmp_path):
    broken = cache / "models--own--tiny/blobs" / listed(folder)[SHARD]["sha256"]
    rot(broken)
    target = tmp_path / "models"
    answer = run(job(folder, target, {"path": str(folder)}, adopt=[str(cache)], move=True))
    assert answer["brought"] == [SHARD, "config.json"] or answer["brought"] == ["config.json", SHARD]
    assert answer["adopted"] == ["b.safetensors"]
    assert broken.exists(), "a file that was not the wanted one was taken away"
    assert same(folder, target)


def test_moving_takes_the_other_name_away_after_the_proof(folder, tmp_path):
    disk = tmp_path / "disk"
    subprocess.run(["cp", "-r", str(folder), str(disk)], check=True)
    run(job(folder, tmp_path / "models", adopt=[str(disk)], move=True))
    assert same(folder, tmp_path / "models")
    assert [path for path in disk.rglob("*") if path.is_file() and ".cache" not in path.parts] == []


def test_a_new_revision_takes_what_it_shares_with_the_old_one(folder, here, tmp_path):
    (folder / "b.safetensors").write_bytes(b"B" * 500)
    answer = run(job(folder, tmp_path / "next", {"path": str(folder)}, adopt=[str(here)]))
    assert (answer["brought"], answer["adopted"]) == (["b.safetensors"], ["config.json", SHARD])
    assert same(folder, tmp_path / "next")


# ---- room and rubbish -----------------------------------------------------------------------------------------------


def test_what_is_here_in_part_counts_as_present(folder, tmp_path):
    target = tmp_path / "models"
    (target / ".partial/sub").mkdir(parents=True)
    (target / "config.json").write_text("{}")
    (target / f".partial/{SHARD}").write_bytes(b"a" * 400)
    plan = fetch.Fetch(job(folder, target), None).foretell()
    assert (plan["room"]["needed"], plan["room"]["present"], plan["room"]["missing"]) == (1502, 402, 1100)
    assert plan["missing"] == ["b.safetensors", SHARD] or plan["missing"] == [SHARD, "b.safetensors"]
    assert not plan["no_room"]
    sentence = fetch.no_room(
        Path("/m"),
        {"needed": 5 << 30, "present": 1 << 30, "adoptable": 0, "missing": 4 << 30, "free": 2 << 30},
        1 << 30,
    )
    assert sentence.endswith(
        ": /m needs 5.0 GiB and has 1.0 GiB of it, 2.0 GiB are free: make 3.0 GiB more room, or put model_fetch_dir on "
        "a larger file system"
    )


def test_what_nobody_waits_for_any_more_goes(folder, tmp_path):
    target = tmp_path / "models"
    (target / ".partial/old").mkdir(parents=True)
    (target / ".partial/old/x").write_text("left over")
    (target / ".partial/b.safetensors").write_bytes(b"b" * 100)
    run(job(folder, target))
    assert [path.name for path in (target / ".partial").rglob("*")] == ["b.safetensors"]
    run(job(folder, target, {"path": str(folder)}))
    assert same(folder, target)


def test_old_revisions_go_on_request_but_never_what_is_served(plugin, tmp_path):
    module = plugin("modules/model_prune.py")
    folders = {}
    for age, digit in enumerate("abcde"):
        folders[digit] = tmp_path / "models/tiny" / (digit * 40)
        folders[digit].mkdir(parents=True)
        (folders[digit] / "config.json").write_text("{}")
        os.utime(folders[digit], (1000 - age, 1000 - age))
    deployed = tmp_path / "deployments/previous"
    deployed.mkdir(parents=True)
    (deployed / "deployment.json").write_text(json.dumps({"model": {"path": str(folders["e"])}, "drafter": None}))
    used = {folders["a"]} | module.served(tmp_path / "deployments")
    assert used == {folders["a"], folders["e"]}
    assert module.old(tmp_path / "models", used, 0) == [folders["b"], folders["c"], folders["d"]]
    assert module.old(tmp_path / "models", used, 2) == [folders["d"]]
    (folders["b"] / "shared").hardlink_to(folders["c"] / "config.json")
    assert module.freed(folders["b"]) == 2


# ---- other schemes --------------------------------------------------------------------------------------------------


def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def rsyncd(folder, tmp_path):
    """An rsync daemon as model_share sets it up, for this user; yields its origin."""
    number, secrets = port(), tmp_path / "secrets"
    secrets.write_text("glm-vllm:one-time\n")
    secrets.chmod(0o600)
    text = (
        f"use chroot = no\nreverse lookup = no\nlog file = {tmp_path}/log\n[model]\npath = {folder}\nread only = yes\n"
    )
    (tmp_path / "rsyncd.conf").write_text(f"{text}auth users = glm-vllm\nsecrets file = {secrets}\n")
    command = ["rsync", "--daemon", "--no-detach", "--address=127.0.0.1", f"--port={number}"]
    daemon = subprocess.Popen([*command, f"--config={tmp_path}/rsyncd.conf"], stdin=subprocess.DEVNULL)
    for _ in range(100):
        try:
            socket.create_connection(("127.0.0.1", number), timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    yield {"url": f"rsync://glm-vllm@127.0.0.1:{number}/model/", "password": "one-time"}
    daemon.terminate()
    daemon.wait()


def sent(tmp_path: Path) -> int:
    """Bytes of content that the daemon has sent, by its log."""
    return sum(int(n) for n in re.findall(r"sent (\d+) bytes", (tmp_path / "log").read_text()))


def test_an_rsync_daemon(folder, rsyncd, tmp_path):
    answer = run(job(folder, tmp_path / "there", rsyncd))
    assert sorted(answer["brought"]) == sorted(listed(folder))
    assert same(folder, tmp_path / "there")


def test_a_torn_copy_is_gone_on_with(folder, rsyncd, tmp_path):
    big = os.urandom(2_000_000)
    (folder / "b.safetensors").write_bytes(big)
    target = tmp_path / "there"
    (target / ".partial").mkdir(parents=True)
    (target / ".partial/b.safetensors").write_bytes(big[:1_500_000])
    run(job(folder, target, rsyncd))
    assert same(folder, target)
    assert sent(tmp_path) < 600_000


def test_a_torn_copy_with_rubbish_in_it_is_thrown_away(folder, rsyncd, tmp_path):
    target = tmp_path / "there"
    (target / ".partial").mkdir(parents=True)
    (target / ".partial/b.safetensors").write_bytes(b"?" * 400)
    run(job(folder, target, rsyncd))
    assert same(folder, target)


def test_only_what_the_peer_has_is_asked_for(folder, rsyncd, tmp_path):
    answer = run(job(folder, tmp_path / "there", rsyncd, only=[SHARD]))
    assert answer["brought"] == [SHARD]
    assert sorted(answer["missing"]) == ["b.safetensors", "config.json"]
    assert not (tmp_path / "there" / model.MANIFEST).exists()


def test_a_wrong_secret_is_said_so_at_once(folder, rsyncd, tmp_path):
    began = time.monotonic()
    with pytest.raises(Refusal, match="auth failed"):
        run(job(folder, tmp_path / "there", rsyncd | {"password": "another"}, backoff=5))
    assert time.monotonic() - began < 5


def test_a_daemon_can_be_a_source(folder, rsyncd, tmp_path):
    given = source(url=rsyncd["url"], revision=REVISION)
    asked = carrier.make(rsyncd)
    with pytest.raises(carrier.Trouble):
        asked.listing()
    main(["manifest", str(folder), "--revision", REVISION, "--output", str(folder / "manifest.json")])
    assert asked.listing() == listed(folder)
    assert carrier.label(given) == rsyncd["url"].replace("glm-vllm@", "")


@pytest.fixture
def website(folder):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.keywords["directory"] = str(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def test_an_http_server(folder, website, tmp_path):
    given = {"sources": [source(url=website, revision=REVISION, name="tiny")], "dir": str(tmp_path / "models")}
    with pytest.raises(Refusal, match="cannot be listed: .*404"):
        sources.choose(given)
    main(["manifest", str(folder), "--revision", REVISION, "--output", str(folder / "manifest.json")])
    chosen = sources.choose(given)
    answer = run(job(folder, Path(chosen["path"]), *chosen["origins"], files=chosen["files"]))
    assert answer["verified"]
    assert same(folder, Path(chosen["path"]))


def test_an_http_server_that_cannot_go_on_in_the_middle(folder, website, tmp_path):
    target = tmp_path / "there"
    (target / ".partial").mkdir(parents=True)
    (target / ".partial/b.safetensors").write_bytes(b"b" * 100)
    run(job(folder, target, {"url": website}))
    assert same(folder, target)


def test_one_failure_ends_all_streams(folder, rsyncd, tmp_path):
    """The first file is wrong at once; the second, however large, is not waited for."""
    wanted = listed(folder) | {"c.safetensors": {"size": 5, "sha256": "0" * 64}}
    (folder / "c.safetensors").write_bytes(b"wrong")
    with pytest.raises(
        Refusal, match="c.safetensors has other content than its SHA-256 says: .* delivered it so 2 times"
    ):
        run(job(folder, tmp_path / "there", rsyncd, files=wanted))
    assert not (tmp_path / "there/c.safetensors").exists()
    assert not (tmp_path / "there" / model.FLAG).exists()


def test_a_folder_on_the_head(folder, tmp_path):
    answer = run(job(folder, tmp_path / "there", {"path": str(folder)}))
    assert (answer["changed"], answer["bytes_brought"]) == (True, 1502)
    again = run(job(folder, tmp_path / "there", {"path": str(folder)}))
    assert (again["changed"], again["bytes_read"], again["brought"]) == (False, 0, [])
    assert same(folder, tmp_path / "there")


# ---- licences -------------------------------------------------------------------------------------------------------


def test_with_a_bundle_nobody_asks_the_hub(plugin):
    """Fails when a site without a network would wait for the hub, or take the hub's copy before its own disk's."""
    offered = plugin("filter/model.py").model_offered
    hub, disk = {"repo": "a/b", "licence": "none"}, {"path": "/mnt/model", "licence": "none"}
    assert offered([hub, disk]) == [hub, disk]
    assert offered([hub, disk], "/srv/bundle") == [disk]
    weights = {"name": "tiny", "revision": "0" * 40, "licence": "Apache-2.0"}
    assert offered([hub, disk], "/srv/bundle", weights) == [
        weights | {"path": "/srv/bundle/weights/tiny/" + "0" * 40},
        disk,
    ]
    assert offered([hub], "/srv/bundle", None) == []


def test_licences(plugin):
    module = plugin("filter/model.py")
    free, bound = source(path="/x"), source(repo="a/b", revision=REVISION, licence="ShapleyMCG-1.0")
    assert module.model_licensed([free, bound], []) == [free]
    assert module.model_refused([free, bound], []) == ["ShapleyMCG-1.0 (a/b@00000000)"]
    assert module.model_refused([free, bound], ["ShapleyMCG-1.0"]) == []
    assert module.model_used([free]) == ["none (/x)"]
    assert module.model_entry(None) is None


def test_served_is_what_verify_looks_at(tmp_path):
    with pytest.raises(Unusable, match=r"manifest.json is missing or damaged: run playbooks/weights.yml"):
        verify.verify(tmp_path, False)
