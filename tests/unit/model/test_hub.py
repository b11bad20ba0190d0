# SPDX-License-Identifier: Apache-2.0
"""`glm-vllm fetch` with the hub's own client against a hub of ours on loopback: what arrives, and what never counts."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-engine/bin/python"
sys.path.insert(0, str(Path(__file__).parent))

from hub import REPO, REVISION, Hub, checkpoint  # noqa: E402  (beside this file, which is no package)

SOURCE = {"repo": REPO, "revision": REVISION, "licence": "none"}
SHARD = "model-00002-of-00004.safetensors"


class Node:
    """One node's folders, and the command on it."""

    def __init__(self, top: Path) -> None:
        self.top, self.dir = top, top / "models"
        self.folder = self.dir / "model" / REVISION
        (top / "run").mkdir()
        self.environment = {"PATH": os.environ["PATH"], "GLM_ROOT": str(top), "HOME": str(top)}
        self.environment |= {"PYTHONPATH": str(ROOT / "files/overlay/src"), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, job: dict, *options: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "glm_vllm_overlay", "fetch", *options, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        process.stdin = None
        return process

    def run(self, job: dict, *options: str) -> tuple[int, dict, str]:
        process = self.start(job, *options)
        out, err = process.communicate(timeout=60)
        return process.returncode, json.loads(out) if out else {}, err

    def job(self, hub: Hub, **more) -> dict:
        """The job for all of the hub's files, without asking it."""
        files = {
            entry["rfilename"]: {
                "size": entry["size"],
                "sha256": entry.get("lfs", {}).get("sha256"),
                "blob": None if "lfs" in entry else entry["blobId"],
            }
            for entry in hub.listing()["siblings"]
            if not entry["rfilename"].startswith(".")
        }
        origin = {"repo": REPO, "revision": REVISION}
        job = {"name": "model", "revision": REVISION, "folder": str(self.folder), "files": files, "origins": [origin]}
        job["endpoint"] = hub.url
        return job | {"streams": 2, "stall": 5, "backoff": 0.05} | more

    def listing(self, hub: Hub, *sources: dict, **more) -> dict:
        job = {"dir": str(self.dir), "sources": list(sources) or [SOURCE], "endpoint": hub.url, "backoff": 0.05}
        return job | more

    def verified(self) -> bool:
        return (self.folder / ".verified.json").exists()

    def whole(self, hub: Hub) -> bool:
        """Every byte as the hub has it, flagged, and nothing else in the folder."""
        wanted = {name: data for name, data in hub.files.items() if not name.startswith(".")}
        found = {p.name: p.read_bytes() for p in self.folder.iterdir() if p.is_file() and not p.name.startswith(".")}
        manifest = json.loads(found.pop("manifest.json"))
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in wanted.items()}
        recorded = {name: entry["sha256"] for name, entry in manifest["files"].items()}
        partial = (self.folder / ".partial").exists()
        return found == wanted and recorded == digests and self.verified() and not partial


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def hub():
    with Hub() as server:
        yield server


def test_the_client_is_the_one_that_the_head_gets():
    code = "import huggingface_hub; print(huggingface_hub.__version__)"
    installed = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert f"huggingface-hub=={installed} " in (ROOT / "files/locks/hub.txt").read_text()


def test_a_full_fetch_learns_what_the_hub_does_not_name_and_a_second_one_asks_nothing(node, hub):
    code, chosen, _ = node.run(node.listing(hub), "--list")
    assert code == 0
    assert chosen["path"] == str(node.folder)
    assert chosen["files"][SHARD]["sha256"] == hashlib.sha256(hub.files[SHARD]).hexdigest()
    assert chosen["files"]["config.json"]["sha256"] is None
    assert ".gitattributes" not in chosen["files"]
    assert chosen["origins"] == [{"repo": REPO, "revision": REVISION}], "what is registered carries no token"
    job = node.job(hub) | {"files": chosen["files"], "origins": chosen["origins"]}
    code, answer, err = node.run(job)
    assert (code, answer.get("verified"), answer.get("changed")) == (0, True, True), err
    assert node.whole(hub)
    assert hub.total() == sum(len(data) for name, data in hub.files.items() if not name.startswith("."))
    hub.asked.clear()
    assert node.run(node.listing(hub), "--list")[1]["files"]["config.json"]["sha256"]
    code, again, _ = node.run(job)
    assert (again["changed"], again["bytes_read"], hub.asked) == (False, 0, [])


def kill(process: subprocess.Popen) -> None:
    """SIGKILL for the command and the client that it started, as a power cut would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def killed_at_random(node: Node, hub: Hub, times: int) -> None:
    """Kill a fetch that many times: each run goes on at the byte where the one before it ended."""
    choice = random.Random(5)
    hub.pause = 0.005
    job = node.job(hub)
    torn = set()
    for _ in range(times):
        process = node.start(job)
        target, deadline = hub.total() + choice.randrange(1, 900_000), time.monotonic() + 20
        while process.poll() is None and hub.total() < target and time.monotonic() < deadline:
            time.sleep(0.002)
        kill(process)
        assert process.returncode == -signal.SIGKILL
        assert not node.verified(), "a broken run left the flag"
        parts = [path for path in (node.folder / ".partial").glob("*") if path.is_file()]
        torn = {
            (path.name, path.stat().st_size) for path in parts if 0 < path.stat().st_size < len(hub.files[path.name])
        }
    hub.pause = 0
    hub.begun.clear()
    code, answer, err = node.run(job)
    assert (code, answer.get("verified")) == (0, True), err
    assert node.whole(hub)
    assert torn, "it was never killed in the middle of a file"
    assert torn <= hub.begun


def test_a_killed_fetch_goes_on_where_it_was(node):
    with Hub(files=checkpoint(size=3_000_000)) as hub:
        killed_at_random(node, hub, 2)


@pytest.mark.full
def test_killed_at_twenty_random_points(node):
    with Hub(files=checkpoint(size=4_000_000)) as hub:
        killed_at_random(node, hub, 20)


def test_an_etag_that_contradicts_the_list_is_refused(node, hub):
    hub.etags[SHARD] = "a" * 64
    code, _, err = node.run(node.job(hub))
    assert code == 1
    assert f"{SHARD} is offered with hash aaaaaaaaaaaa instead of" in err
    assert not node.verified()


def test_a_repository_that_is_gone_is_passed_over(node, hub):
    code, chosen, _ = node.run(node.listing(hub, SOURCE | {"repo": "gone/gone"}, SOURCE), "--list")
    assert (code, chosen["source"]["repo"]) == (0, REPO)
    (reason,) = chosen["passed_over"]
    assert "gone/gone@01234567 cannot be listed" in reason
    assert "404" in reason


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_hub_is_given_the_time_it_asks_for(node, hub, status):
    hub.list_faults = [(status, {"Retry-After": "1"})]
    began = time.monotonic()
    assert node.run(node.listing(hub), "--list")[0] == 0
    assert time.monotonic() - began >= 1

    def busy(handler, data):
        del hub.faults[SHARD]
        handler.answer(status, {"Retry-After": "1"})

    hub.faults[SHARD] = busy
    assert node.run(node.job(hub))[1]["verified"]
    assert node.whole(hub)


def test_a_body_that_ends_too_early_is_gone_on_with(node):
    cut = []

    def short(handler, data):
        cut.append(handler.headers.get("Range"))
        handler.send(SHARD, data, until=300_000 if len(cut) == 1 else None)

    with Hub(files=checkpoint(size=600_000), faults={SHARD: short}) as hub:
        code, answer, err = node.run(node.job(hub))
        assert (code, answer.get("verified")) == (0, True), err
        assert cut == [None, f"bytes={2**18}-"]
        assert hub.served[SHARD] == 300_000 + len(hub.files[SHARD]) - 2**18


def test_wrong_bytes_of_the_right_size_never_count(node, hub):
    hub.faults[SHARD] = lambda handler, data: handler.send(SHARD, data[:-1] + bytes([data[-1] ^ 1]))
    code, _, err = node.run(node.job(hub))
    assert code == 1
    assert f"{SHARD} has other content than its SHA-256 says: {REPO}@01234567 delivered it so 2 times" in err
    assert not (node.folder / SHARD).exists()
    assert not node.verified()
    del hub.faults[SHARD]
    before = hub.total()
    assert node.run(node.job(hub))[1]["brought"][-1:] == [SHARD] or hub.total() > before
    assert node.whole(hub)


def test_small_files_are_held_to_gits_own_hash(node, hub):
    hub.faults["config.json"] = lambda handler, data: handler.send("config.json", data[:-1] + b"]")
    assert "config.json has other content than the hub names" in node.run(node.job(hub))[2]
    assert not node.verified()


def test_a_moved_main_changes_nothing(node, hub):
    hub.revision = "f" * 40
    code, _, err = node.run(node.listing(hub), "--list")
    assert code == 1
    assert f"the hub answers with commit {'f' * 40}" in err
    assert "is offered at commit ffff" in node.run(node.job(hub))[2]


def test_a_token_that_has_expired_is_said_so_at_once(node, hub):
    hub.token = "hf_" + "new"
    code, _, err = node.run(node.listing(hub, token="hf_" + "old"), "--list")
    assert code == 1
    assert "cannot be listed" in err
    assert "401" in err
    assert "old" not in err
    job = node.job(hub)
    job["token"] = "hf_" + "old"
    began = time.monotonic()
    assert node.run(job)[0] == 1
    assert time.monotonic() - began < 10, "a denied file was asked for again and again"
    job["token"] = "hf_" + "new"
    assert node.run(job)[1]["verified"]


def test_a_stream_that_stands_still_is_begun_anew(node, hub):
    stood = []

    def stand(handler, data):
        if stood:
            return handler.send(SHARD, data)
        stood.append(1)
        handler.send(SHARD, data, until=2**17)
        time.sleep(20)
        return None

    hub.faults[SHARD] = stand
    began = time.monotonic()
    code, answer, err = node.run(node.job(hub, stall=2))
    assert (code, answer.get("verified")) == (0, True), err
    assert time.monotonic() - began < 20


def test_a_revision_without_weights_or_with_too_few_is_refused(node):
    with Hub(files={"config.json": b"{}", ".gitattributes": b""}) as hub:
        assert "holds no weights" in node.run(node.listing(hub), "--list")[2]
    files = checkpoint()
    del files[SHARD]
    with Hub(files=files) as hub:
        code, _, err = node.run(node.job(hub))
        assert code == 2
        assert "is short: model.safetensors.index.json names 1 files that it does not hold" in err
        assert not node.verified()
        assert not any(name.endswith(".safetensors") for name in hub.served), "shards came before the index was read"


def test_a_hash_that_was_learnt_holds_from_then_on(node, hub):
    assert node.run(node.job(hub))[1]["verified"]
    hub.files[SHARD] = hub.files[SHARD][:-1] + b"!"
    code, _, err = node.run(node.job(hub))
    assert code == 1
    assert f"the source names another SHA-256 for {SHARD}" in err


def test_a_manifest_of_ours_is_held_against_the_hub(node, hub):
    trusted = {name: entry | {"sha256": "a" * 64} for name, entry in node.job(hub)["files"].items()}
    more = {"manifests": {f"model/{REVISION}": {"files": trusted}}}
    code, _, err = node.run(node.listing(hub, **more), "--list")
    assert code == 1
    assert re.search(rf"{REPO}@01234567 has another model-\d+-of-00004.safetensors than files/manifests says", err)


def test_two_runs_at_once_bring_everything_once(node, hub):
    hub.pause = 0.005
    first, second = node.start(node.job(hub)), node.start(node.job(hub))
    ends = [(p.communicate(timeout=60), p.returncode) for p in (first, second)]
    assert sorted(code for _, code in ends) == [0, 1]
    assert "another run is at work" in "".join(err for (_, err), _ in ends)
    assert node.whole(hub)
    assert hub.total() == sum(len(data) for name, data in hub.files.items() if not name.startswith("."))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_disk_that_fills_up_is_said_so_and_what_came_stays(node):
    node.dir.mkdir()
    with Hub(files=checkpoint(size=1_000_000)) as hub:
        # 90 % of it, as when something else took the room that there was when the run began
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3600k", "tmpfs", node.dir], check=True)
        try:
            code, _, err = node.run(node.job(hub, reserve=0))
            assert code == 1
            assert "0.0 GiB are free: make 0.0 GiB more room" in err
            code, _, err = node.run(node.job(hub, reserve=-(2**30)))
            assert code == 1
            assert re.search(r"no room is left for model-0000\d-of-00004.safetensors; make room and run again", err)
            assert not node.verified()
            came = hub.total()
            assert came > 3_000_000
            subprocess.run(["mount", "-o", "remount,size=8000k", node.dir], check=True)
            assert node.run(node.job(hub, reserve=0))[1]["verified"]
            assert node.whole(hub)
            assert hub.total() - came < 2_000_000
        finally:
            subprocess.run(["umount", node.dir], check=True)


def test_status_can_tell_how_far_it_is(node, hub):
    hub.pause = 0.05
    process = node.start(node.job(hub, streams=1))
    seen = []
    while process.poll() is None:
        try:
            seen.append(json.loads((node.top / "run/glm-vllm-model/progress.json").read_text()))
        except (OSError, ValueError):
            pass
        time.sleep(0.05)
    process.communicate()
    late = seen[-1]
    assert late["total"] > late["done"] > 0
    assert late["rate"] > 0
    assert re.fullmatch(
        r"fetching model from own/model@01234567: 0.0 GiB of 0.0 GiB, \d+ MB/s, \d+ s left", late["says"]
    )
    assert not (node.top / "run/glm-vllm-model/progress.json").exists()
