"""`glm-vllm gate`: one sentence for every refusal, and two gates that meet."""

import hashlib
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from glm_vllm_overlay.node import gate, state
from glm_vllm_overlay.node.paths import Paths

FIXTURES = Path(__file__).parents[2] / "fixtures"


UNIT_ENVIRONMENT = {"GLM_GPU_MEMORY_UTILIZATION": "0.87", "GLM_SPECULATOR": "dflash2", "ABLIT": "0"}


@pytest.fixture(autouse=True)
def unit(node, monkeypatch):
    """The gate as a unit's ExecStartPre, with a clock that tests can wait for."""
    for key, value in (UNIT_ENVIRONMENT | {"INVOCATION_ID": "own-start"}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(gate, "POLL", 0.02)
    monkeypatch.setattr(gate, "MEMORY_PATIENCE", 0.1)
    monkeypatch.setattr(gate, "DIFFERENCE_PATIENCE", 0.1)
    node.unit("glm-vllm-head", ActiveState="activating", SubState="start-pre")


def refused(glm_vllm, node, code: int = 1) -> str:
    """Run the gate, see it refuse in one sentence that it also published; returns the sentence."""
    got, out, err = glm_vllm("gate", "--json")
    assert got == code, err
    message = json.loads(out)["message"]
    assert err == f"glm-vllm gate: {message}\n"
    assert node.read_session()["says"] == message
    assert node.read_session()["ready"] in (False, True)
    return message


def test_passes_and_leaves_a_session(node, peer, glm_vllm):
    code, out, _ = glm_vllm("gate")
    assert (code, out) == (0, "spark-a and spark-b start together\n")
    session = node.read_session()
    assert (session["id"], session["peer"], session["ready"]) == ("own-start", "peer-start", True)
    assert session["environment"] == UNIT_ENVIRONMENT
    assert "VLLM_HOST_IP" in (node.root / "run/glm-vllm/fabric.env").read_text()
    assert (node.root / "proc/sys/vm/drop_caches").read_text() == "1\n"


def test_has_the_driver_make_the_device_files(node, peer, glm_vllm):
    helper = node.root / "usr/bin/nvidia-modprobe"
    node.program(helper, '#!/bin/sh\necho "$*" >> "$GLM_ROOT/asked"\nexit 1\n')
    assert glm_vllm("gate")[0] == 0
    assert (node.root / "asked").read_text() == "-c=0\n-c=0 -u\n"


def test_no_address(node, peer, glm_vllm):
    node.addresses("[]")
    assert "no interface has this address" in refused(glm_vllm, node)


def test_no_carrier(node, peer, glm_vllm):
    node.addresses(json.dumps(json.loads((node.root / "ip-addr.json").read_text())).replace("LOWER_UP", "NO-CARRIER"))
    assert "no carrier; check the cable to spark-b" in refused(glm_vllm, node)


def test_a_cable_that_comes_late_is_waited_for(node, peer, glm_vllm):
    there = (node.root / "ip-addr.json").read_text()
    node.env(GLM_GATE_TIMEOUT=10)
    node.addresses("[]")
    threading.Timer(0.15, node.addresses, [there]).start()
    assert glm_vllm("gate")[0] == 0


def test_memory_tells_need_have_and_largest(node, peer, glm_vllm):
    text = (FIXTURES / "meminfo/healthy.txt").read_text()
    (node.root / "proc/meminfo").write_text(text.replace("119500000", "100000000"))
    assert refused(glm_vllm, node).startswith(
        "needs 109.8 GiB, has 95.4 available (112.5 free); largest utilisation that starts here: 0.75 "
    )


def test_the_largest_utilisation_really_starts(node, peer, glm_vllm, monkeypatch):
    text = (FIXTURES / "meminfo/healthy.txt").read_text()
    (node.root / "proc/meminfo").write_text(text.replace("119500000", "100000000"))
    monkeypatch.setenv("GLM_GPU_MEMORY_UTILIZATION", "0.75")
    peer.document["environment"]["GLM_GPU_MEMORY_UTILIZATION"] = "0.75"
    assert glm_vllm("gate")[0] == 0
    monkeypatch.setenv("GLM_GPU_MEMORY_UTILIZATION", "0.76")
    assert "largest utilisation that starts here: 0.75" in refused(glm_vllm, node)


def test_a_spark_full_of_page_cache_starts(node, peer, glm_vllm):
    shutil.copy(FIXTURES / "meminfo/page_cache_full.txt", node.root / "proc/meminfo")
    assert glm_vllm("gate")[0] == 0


def test_half_a_spark_does_not(node, peer, glm_vllm):
    shutil.copy(FIXTURES / "meminfo/spark_64gb.txt", node.root / "proc/meminfo")
    node.env(GLM_START_COST_BYTES=8 * 1024**3)
    assert "needs 60.2 GiB, has 56.7 available (55.3 free); largest utilisation that starts here: 0.81" in refused(
        glm_vllm, node
    )


def test_meminfo_is_read_where_node_env_says(node, peer, glm_vllm):
    (node.root / "other").write_text("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 1 kB\n")
    node.env(GLM_MEMINFO=node.root / "other", GLM_START_COST_BYTES=0)
    assert "largest utilisation that starts here: 0.01" in refused(glm_vllm, node)


def test_memory_that_comes_back_is_waited_for(node, peer, glm_vllm, monkeypatch):
    node.env(GLM_GATE_TIMEOUT=10)
    monkeypatch.setattr(gate, "MEMORY_PATIENCE", 10)
    good = (FIXTURES / "meminfo/healthy.txt").read_text()
    (node.root / "proc/meminfo").write_text(good.replace("119500000", "100000000"))
    threading.Timer(0.05, node.put, ["proc/meminfo", good]).start()
    assert glm_vllm("gate")[0] == 0


def test_caches_that_cannot_be_dropped(node, peer, glm_vllm):
    node.env(GLM_DROP_CACHES=node.root / "no/such/file")
    assert "run the gate as root" in refused(glm_vllm, node, 2)


def test_a_node_that_was_not_prepared(node, peer, glm_vllm):
    (node.root / "usr/local/sbin/glm-vllm-drop-caches").unlink()
    assert "glm-vllm-drop-caches cannot be run (No such file or directory): run playbooks/nodes.yml" in refused(
        glm_vllm, node, 2
    )


@pytest.mark.parametrize(("name", "entry"), [("model", "target"), ("drafter", "drafter")])
def test_unverified_weights(node, peer, glm_vllm, name, entry):
    node.weights(entry, verified=False)
    said = refused(glm_vllm, node)
    assert said.startswith(f"{entry}@rev1 is not verified on spark-a (")
    assert said.endswith("was never verified): run playbooks/weights.yml")


def test_never_verified_weights(node, peer, glm_vllm):
    (node.root / "var/lib/glm-vllm/models/target/rev1/.verified.json").unlink()
    assert "target@rev1 is not verified on spark-a" in refused(glm_vllm, node)


def test_dflash2_without_a_drafter(node, peer, glm_vllm):
    node.deploy("a: 1\n", drafter=None)
    assert "set glm_vllm_overlay_speculator: mtp" in refused(glm_vllm, node)


def test_mtp_needs_no_drafter(node, peer, glm_vllm, monkeypatch):
    document = node.deploy((node.root / "etc/glm-vllm/serve.yaml").read_text(), drafter=None)
    assert document["drafter"] is None
    monkeypatch.setenv("GLM_SPECULATOR", "mtp")
    peer.document["environment"]["GLM_SPECULATOR"] = "mtp"
    peer.document["drafter"] = None
    assert glm_vllm("gate")[0] == 0


RELEASE = "opt/glm-vllm/releases/r1"


def test_kernels_that_are_missing(node, peer, glm_vllm):
    (node.root / RELEASE / "venv/lib/glm-vllm/glm_exl3.so").unlink()
    message = refused(glm_vllm, node)
    assert "glm_exl3.so cannot be read: stop both engines, remove " in message
    assert message.endswith("releases/r1 and run playbooks/release.yml")


def test_kernels_of_another_build(node, peer, glm_vllm):
    (node.root / RELEASE / "venv/lib/glm-vllm/glm_exl3.so").write_bytes(b"kernel5")
    assert "glm_exl3.so is not the file that the release's manifest names: stop both" in refused(glm_vllm, node)


@pytest.mark.parametrize("manifest", [{}, {"kernels": {}}, {"kernels": {"files": {}}}])
def test_a_release_that_names_no_kernels(node, peer, glm_vllm, manifest):
    (node.root / RELEASE / "manifest.json").write_text(json.dumps(manifest))
    assert "releases/r1/manifest.json names no kernels: stop both" in refused(glm_vllm, node)


def test_a_release_for_machines_without_a_gpu(node, peer, glm_vllm):
    manifest = node.root / RELEASE / "manifest.json"
    manifest.write_text(json.dumps({"kernels": None}))
    peer.document["release_sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    assert glm_vllm("gate")[0] == 0


def toolkit(node, version: str) -> None:
    """A CUDA toolkit of that version at /cuda."""
    node.program(node.root / "cuda/bin/nvcc", f"#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V{version}'\n")


def modules(node, peer, files: dict[str, str] | None) -> Path:
    """A release that needs FlashInfer's modules, and what is said to be there of them; returns their folder."""
    manifest = node.root / RELEASE / "manifest.json"
    document = json.loads(manifest.read_text()) | {"modules": "/var/cache/glm-vllm/r1-modules", "cuda_home": "/cuda"}
    toolkit(node, "13.0.88")
    manifest.write_text(json.dumps(document))
    peer.document["release_sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    folder = node.root / "var/cache/glm-vllm/r1-modules"
    folder.mkdir(parents=True)
    if files is not None:
        (folder / "modules.json").write_text(json.dumps({"schema": 1, "toolkit": "13.0.88", "files": files}))
    return folder


def test_modules_that_are_compiled(node, peer, glm_vllm):
    (modules(node, peer, {"sampling": "sampling.so"}) / "sampling.so").write_bytes(b"code")
    assert glm_vllm("gate")[0] == 0


@pytest.mark.parametrize("files", [None, {}])
def test_modules_that_were_never_compiled(node, peer, glm_vllm, files):
    folder = modules(node, peer, files)
    if files == {}:
        (folder / "modules.json").write_text("damaged")
    message = refused(glm_vllm, node)
    assert f"not all in {folder} (without modules.json), so the engine would compile with the weights" in message
    assert message.endswith("memory: run playbooks/release.yml")


def test_a_module_that_is_gone(node, peer, glm_vllm):
    folder = modules(node, peer, {"sampling": "sampling.so", "topk": "topk.so"})
    (folder / "sampling.so").write_bytes(b"code")
    assert f"not all in {folder} (without topk), so the engine would compile" in refused(glm_vllm, node)


def test_modules_of_another_toolkit(node, peer, glm_vllm):
    (modules(node, peer, {"sampling": "sampling.so"}) / "sampling.so").write_bytes(b"code")
    toolkit(node, "13.0.99")
    assert f"(compiled with CUDA 13.0.88, and {node.root}/cuda/bin/nvcc is 13.0.99), so the" in refused(glm_vllm, node)


def rehearsed(node, peer, **changes: object) -> Path:
    """A deployment whose start was rehearsed, its list with `changes`; returns the folder of its caches."""
    modules(node, peer, None)
    manifest = node.root / RELEASE / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"modules": None}))
    peer.document["release_sha256"] = hashlib.sha256(manifest.read_bytes()).hexdigest()
    node.deploy((node.root / "etc/glm-vllm/serve.yaml").read_text(), caches="/var/cache/glm-vllm/r1-0123abcd")
    folder = node.root / "var/cache/glm-vllm/r1-0123abcd"
    (folder / "triton").mkdir(parents=True)
    for name in ("a.cubin", "b.cubin"):
        (folder / "triton" / name).write_bytes(b"code")
    document = {"schema": 1, "key": folder.name, "toolkit": "13.0.88"}
    document |= {"files": {"triton/a.cubin": 4, "triton/b.cubin": 4}} | changes
    (folder / "rehearsal.json").write_text(json.dumps(document))
    return folder


def test_a_start_that_was_rehearsed(node, peer, glm_vllm):
    rehearsed(node, peer)
    assert glm_vllm("gate")[0] == 0


def unrehearsed(glm_vllm, node, folder: Path) -> str:
    """Why the gate refuses a start, in the middle of its sentence."""
    before, after = f"memory, since {folder} ", ": run playbooks/serve.yml, which rehearses the start"
    message = refused(glm_vllm, node)
    assert before in message and message.endswith(after)
    return message.partition(before)[2].removesuffix(after)


def test_a_start_that_was_not_rehearsed(node, peer, glm_vllm):
    folder = rehearsed(node, peer)
    (folder / "rehearsal.json").unlink()
    assert unrehearsed(glm_vllm, node, folder) == "has no rehearsal.json"


@pytest.mark.parametrize("loss", ["gone", "cut"])
def test_a_kernel_that_is_not_whole(node, peer, glm_vllm, loss):
    folder = rehearsed(node, peer)
    (folder / "triton/b.cubin").write_bytes(b"cod")
    if loss == "gone":
        (folder / "triton/b.cubin").unlink()
    assert unrehearsed(glm_vllm, node, folder) == "lacks triton/b.cubin"
    (folder / "triton/a.cubin").unlink()
    assert unrehearsed(glm_vllm, node, folder) == "lacks triton/a.cubin and 1 more"


def test_the_rehearsal_of_another_engine(node, peer, glm_vllm):
    folder = rehearsed(node, peer, key="r1-99999999")
    assert unrehearsed(glm_vllm, node, folder) == "has the list of another engine (r1-99999999)"


def test_the_rehearsal_with_another_toolkit(node, peer, glm_vllm):
    """Which compiler there is, root's manifest says: the engine may write the list, and the gate runs the compiler."""
    folder = rehearsed(node, peer, nvcc="/bin/false")
    toolkit(node, "13.0.99")
    nvcc = node.root / "cuda/bin/nvcc"
    assert unrehearsed(glm_vllm, node, folder) == f"was compiled with CUDA 13.0.88, and {nvcc} is 13.0.99"
    nvcc.unlink()
    assert unrehearsed(glm_vllm, node, folder).endswith(f"and {nvcc} is not there")


def test_a_release_that_is_not_there(node, peer, glm_vllm):
    (node.root / RELEASE / "manifest.json").unlink()
    assert "releases/r1/manifest.json does not exist: run site.yml" in refused(glm_vllm, node, 2)


def test_a_peer_of_before_manifests_had_to_agree(node, peer, glm_vllm):
    del peer.document["release_sha256"]
    assert "and spark-b none: run playbooks/release.yml for both" in refused(glm_vllm, node)


def test_no_deployment(node, peer, glm_vllm):
    (node.root / "var/lib/glm-vllm/deployments/current/deployment.json").unlink()
    assert "deployment.json does not exist: run site.yml" in refused(glm_vllm, node, 2)


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("ABLIT", "yes", "glm_vllm_overlay_ablation_enabled"),
        ("GLM_SPECULATOR", "eagle", "glm_vllm_overlay_speculator"),
        ("GLM_GPU_MEMORY_UTILIZATION", "1.2", "glm_vllm_overlay_gpu_memory_utilization"),
        ("GLM_GPU_MEMORY_UTILIZATION", "much", "glm_vllm_overlay_gpu_memory_utilization"),
    ],
)
def test_a_unit_that_asks_for_nonsense(node, peer, glm_vllm, monkeypatch, variable, value, setting):
    monkeypatch.setenv(variable, value)
    message = refused(glm_vllm, node, 2)
    assert f"{variable}={value}" in message
    assert setting in message


def test_outside_a_unit(node, peer, glm_vllm, monkeypatch):
    monkeypatch.delenv("INVOCATION_ID")
    code, _, err = glm_vllm("gate")
    assert code == 2
    assert "start that unit instead" in err


def test_silent_peer(node, glm_vllm):
    message = refused(glm_vllm, node)
    assert message.startswith("the watch of spark-b gives no answer (")
    assert "`systemctl status glm-vllm-watch`" in message
    assert node.read_session()["ready"] is False


def test_peer_that_does_not_know_this_node(node, peer, glm_vllm):
    peer.door.peers = {"192.0.2.1"}
    assert "403" in refused(glm_vllm, node)


def test_stopped_peer(node, peer, glm_vllm):
    peer.document["phase"] = "stopped"
    assert refused(glm_vllm, node) == (
        "glm-vllm-worker on spark-b is stopped: start it there with `systemctl start glm-vllm-worker`"
    )


def test_failed_peer_tells_its_own_reason(node, peer, glm_vllm):
    peer.document["phase"] = "failed"
    peer.document["unit"]["outcome"] = "needs 10 GiB, has 9"
    assert "glm-vllm-worker on spark-b has failed (needs 10 GiB, has 9): start it" in refused(glm_vllm, node)


def test_peer_that_waits_at_its_gate_tells_for_what(node, peer, glm_vllm):
    peer.document["session"] |= {"ready": False, "says": "rail 0 (192.0.2.12): no carrier"}
    assert refused(glm_vllm, node) == "spark-b is not at the gate yet: rail 0 (192.0.2.12): no carrier"


@pytest.mark.parametrize("phase", ["gate", "loading", "serving"])
def test_peer_of_an_earlier_start(node, peer, glm_vllm, phase):
    peer.document["phase"] = phase
    peer.document["session"]["peer"] = "an-earlier-start"
    assert "still belongs to an earlier start of this node" in refused(glm_vllm, node)


def test_peer_that_went_through_first(node, peer, glm_vllm):
    peer.document["phase"] = "loading"
    peer.document["session"]["peer"] = "own-start"
    assert glm_vllm("gate")[0] == 0


DIFFERENCES = [
    (
        "GLM_GPU_MEMORY_UTILIZATION",
        "0.80",
        "spark-a runs GLM_GPU_MEMORY_UTILIZATION=0.87 and spark-b 0.80: undo "
        "`systemctl edit glm-vllm-head` on spark-a or `systemctl edit glm-vllm-worker` on spark-b, "
        "or set glm_vllm_overlay_gpu_memory_utilization for both",
    ),
    ("GLM_SPECULATOR", "mtp", "spark-a runs GLM_SPECULATOR=dflash2 and spark-b mtp: undo"),
    ("ABLIT", "1", "spark-a runs ABLIT=0 and spark-b 1: undo"),
    ("ABLIT", "", "spark-a runs ABLIT=0 and spark-b nothing: undo"),
    ("executor", "ray", "spark-a has executor mp and spark-b ray: run site.yml for both"),
    ("release", "r2", "spark-a has release r1 and spark-b r2: run site.yml for both"),
    ("release_sha256", "0123456789abcdef", "and spark-b 0123456789ab: run playbooks/release.yml for both"),
    ("config_sha256", "0123456789abcdef", "and spark-b 0123456789ab: run playbooks/serve.yml for both"),
    (
        "chat_template_sha256",
        "0123456789abcdef",
        "a chat template with hash none and spark-b 0123456789ab: run playbooks",
    ),
    ("model", "target@rev2", "spark-a has model target@rev1 and spark-b target@rev2: run site.yml for both"),
    ("drafter", None, "spark-a has drafter drafter@rev1 and spark-b none: run site.yml for both"),
    ("model_verified", False, "target@rev1 is not verified on spark-b: run playbooks/weights.yml"),
]


def set_difference(document: dict, key: str, value: object) -> None:
    (document["environment"] if key.isupper() else document)[key] = value


@pytest.mark.parametrize(("key", "value", "sentence"), DIFFERENCES)
def test_nodes_that_would_run_different_things(node, peer, glm_vllm, key, value, sentence):
    node.env(GLM_GATE_TIMEOUT=60)
    set_difference(peer.document, key, value)
    began = time.monotonic()
    assert sentence in refused(glm_vllm, node)
    assert time.monotonic() - began < 20, "a settled difference is not waited for until the gate's timeout"


def test_what_only_one_unit_says_is_found_without_its_value(node, peer, glm_vllm):
    """A variable that is the same on both is no difference; state says no value."""
    shown = "GLM_GPU_MEMORY_UTILIZATION=0.87 GLM_SPECULATOR=dflash2 ABLIT=0 VLLM_SAME=1 VLLM_KEY=secret"
    node.unit("glm-vllm-head", ActiveState="activating", SubState="start-pre", Environment=shown)
    mine = state.own(Paths(node.root))
    assert "secret" not in json.dumps(mine) and set(mine["unit"]["environment"]) == {"VLLM_SAME", "VLLM_KEY"}
    peer.document["unit"]["environment"] = {"VLLM_SAME": mine["unit"]["environment"]["VLLM_SAME"]}
    assert "do not give the engine the same VLLM_KEY: undo" in refused(glm_vllm, node)
    peer.document["unit"]["environment"] = mine["unit"]["environment"]
    assert glm_vllm("gate")[0] == 0


def test_a_promotion_under_way_is_waited_for(node, peer, glm_vllm, monkeypatch):
    node.env(GLM_GATE_TIMEOUT=10)
    monkeypatch.setattr(gate, "DIFFERENCE_PATIENCE", 10)
    peer.document["release"] = "r0"
    threading.Timer(0.08, peer.document.update, [{"release": "r1"}]).start()
    assert glm_vllm("gate")[0] == 0


def test_under_ray_the_engine_units_environment_counts(node, peer, glm_vllm, monkeypatch):
    node.env(GLM_EXECUTOR="ray")
    peer.document["executor"] = "ray"
    for key in UNIT_ENVIRONMENT:
        monkeypatch.delenv(key)
    node.unit("glm-vllm-head", Environment="GLM_GPU_MEMORY_UTILIZATION=0.80 GLM_SPECULATOR=dflash2 ABLIT=0")
    node.unit("ray-head", SubState="start-pre", ActiveState="activating", Environment="")  # InvocationID is ours
    assert "spark-a runs GLM_GPU_MEMORY_UTILIZATION=0.80 and spark-b 0.87" in refused(glm_vllm, node)


def test_under_ray_the_engines_own_unit_has_no_gate(node, peer, glm_vllm):
    node.env(GLM_EXECUTOR="ray")
    node.unit("ray-head", InvocationID="rays-start")
    code, _, err = glm_vllm("gate")
    assert code == 2
    assert "executor ray has its gate in ray-head, not in this unit" in err


def test_a_run_folder_that_nothing_makes(node, peer, glm_vllm):
    shutil.rmtree(node.root / "run/glm-vllm")
    node.program(node.root / "bin/systemd-tmpfiles", "#!/bin/sh\n")
    code, _, err = glm_vllm("gate")
    assert code == 2
    assert "no file in tmpfiles.d makes it" in err


def test_a_wiped_run_folder_is_made_again(node, peer, glm_vllm):
    shutil.rmtree(node.root / "run/glm-vllm")
    tmpfiles = (
        '#!/bin/sh\n[ "$1 $2" = "--create --prefix=$GLM_ROOT/run/glm-vllm" ] && mkdir -p "$GLM_ROOT/run/glm-vllm"\n'
    )
    node.program(node.root / "bin/systemd-tmpfiles", tmpfiles)
    assert glm_vllm("gate")[0] == 0
    assert (node.root / "run/glm-vllm/fabric.env").exists()


def test_two_real_nodes_meet(node, worker):
    """Two watches and two gates as processes; the later gate's start frees the earlier one."""
    for side, start in ((node, "start-a"), (worker, "start-b")):
        side.env(GLM_GATE_TIMEOUT=20)
        side.unit(side.unit_name, ActiveState="activating", SubState="start-pre", InvocationID=start)
    watches = [side.start("watch") for side in (node, worker)]
    first = node.start("gate", INVOCATION_ID="start-a", **UNIT_ENVIRONMENT)
    time.sleep(1)
    assert first.poll() is None, "a gate without its peer waits"
    second = worker.start("gate", INVOCATION_ID="start-b", **UNIT_ENVIRONMENT)
    try:
        assert first.communicate(timeout=20)[0] == "spark-a and spark-b start together\n"
        assert second.communicate(timeout=20)[0] == "spark-b and spark-a start together\n"
        assert (first.returncode, second.returncode) == (0, 0)
        assert (node.read_session()["peer"], worker.read_session()["peer"]) == ("start-b", "start-a")
    finally:
        for process in (*watches, first, second):
            process.kill()
            process.communicate()
