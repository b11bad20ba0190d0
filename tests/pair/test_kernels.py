"""Kernels are compiled once for the pair and are the same on both nodes; FlashInfer's modules on each by itself; what
the engine compiles by itself on the head, and the others get it.

The nodes have no toolkit: a program stands in for `glm-vllm build`, everything around it is the role's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import bed
import pair
import pytest

RELEASE = "/var/tmp/release-of-a-test"
KERNELS = f"{RELEASE}/venv/lib/glm-vllm"
MODULES = "/var/tmp/modules-of-a-test"
CACHES = "/var/tmp/caches-of-a-test"
FILES = ("glm_exl3.so", "LICENSE.exllamav3", "manifest.json")
# Writes what a build writes, with bytes that no other build has, or refuses with what the file `refuse` says.
BUILD = f"""#!/bin/sh
# say WHETHER_IT_IS_THERE "$@": whether something was done, or has to be
say() {{ [ -e "$1" ] && changed=false || changed=true; echo '{{"ok": true, "changed": '$changed'}}'; }}
case "$*" in
  *--modules*)
    say "$FLASHINFER_WORKSPACE_BASE/modules.json"
    case "$* $changed" in *--planned*|*false) exit;; esac
    cd "$FLASHINFER_WORKSPACE_BASE" && echo "$(id -un) $MAX_JOBS $FLASHINFER_NVCC" >> calls && touch modules.json
    exit;;
  *--rehearsal=*)
    cd "$(dirname "$TRITON_CACHE_DIR")" || exit
    if [ -e refuse ]; then case "$*" in *--planned*) ;; *) cat refuse; exit 1;; esac; fi
    say rehearsal.json
    case "$* $changed" in *--planned*|*false) exit;; esac
    echo "$(id -un) $*" >> calls
    mkdir -p triton && head -c 1000 /dev/urandom > triton/k.cubin && sha256sum triton/k.cubin > rehearsal.json
    tar -cf rehearsal.tar triton rehearsal.json
    exit;;
esac
echo "$@" >> {RELEASE}/calls
if [ -e {RELEASE}/refuse ]; then cat {RELEASE}/refuse; exit 1; fi
mkdir -p {KERNELS} && cd {KERNELS}
head -c 1000 /dev/urandom > glm_exl3.so
echo MIT > LICENSE.exllamav3
printf '{{"files": {{"glm_exl3.so": "%s"}}}}' "$(sha256sum < glm_exl3.so | cut -c1-64)" | tee manifest.json
"""


@pytest.fixture(autouse=True)
def releases() -> Iterator[None]:
    """An unfinished release on both nodes, whose `glm-vllm` is BUILD."""
    program = f"{RELEASE}/venv/bin/glm-vllm"
    try:
        for node in pair.NODES:
            bed.on(node, "install", "-D", "-m", "755", "/dev/null", program)
            pair.write(node, program, BUILD)
        yield
    finally:
        for node in pair.NODES:
            bed.on(node, "rm", "-rf", RELEASE, MODULES, CACHES)


def run(tmp_path: Path) -> pair.Run:
    """The role's tasks, with the folder of the test's release in the place of the real one."""
    return pair.run_playbook(
        "tests/pair/kernels.yml",
        __glm_vllm_overlay_release_dir=RELEASE,
        __glm_vllm_overlay_source={"archive": str(tmp_path / "release.tar")},
        cuda_sm121_cuda_home="/opt/cuda-13.1",
    )


def sums(node: str) -> str:
    """SHA-256 and name of each of a node's kernel files, and of the release's manifest."""
    files = [f"{KERNELS}/{name}" for name in FILES]
    return bed.on(node, "sha256sum", *files, f"{RELEASE}/manifest.json")


def calls(node: str) -> list[str]:
    """Arguments of each call of a node's `glm-vllm`."""
    return bed.on(node, "sh", "-c", f"cat {RELEASE}/calls 2>/dev/null || true").splitlines()


def test_head_compiles_for_both_and_later_takes_from_the_worker(tmp_path: Path) -> None:
    """Fails when both nodes compile, or when a head without its release compiles anew: two builds differ."""
    first = run(tmp_path)
    assert first.status == 0, first.failures()
    (call,) = calls(bed.HEAD)
    assert call.startswith("build --json --cuda-home=/opt/cuda-13.1 ")
    assert f"--target={KERNELS} " in call
    assert sums(bed.HEAD) == sums(bed.WORKER)
    before = sums(bed.WORKER)

    bed.on(bed.HEAD, "rm", "-r", f"{RELEASE}/manifest.json", KERNELS)
    second = run(tmp_path)
    assert second.status == 0, second.failures()
    assert set(second.changed()) == {bed.HEAD}
    assert sums(bed.HEAD) == sums(bed.WORKER) == before
    assert (len(calls(bed.HEAD)), calls(bed.WORKER)) == (1, [])


@pytest.mark.full
def test_kernels_of_another_build_are_replaced(tmp_path: Path) -> None:
    """Fails when two whole releases with different kernels are left alone, or a second run finds work."""
    assert run(tmp_path).status == 0
    before = sums(bed.HEAD)
    pair.write(bed.WORKER, f"{KERNELS}/glm_exl3.so", "another")
    pair.write(bed.WORKER, f"{RELEASE}/manifest.json", "{}")
    assert run(tmp_path).status == 0
    assert sums(bed.HEAD) == sums(bed.WORKER) == before
    assert run(tmp_path).total("changed") == {}


def test_refusal_is_the_compilers_sentence_and_nobody_goes_on(tmp_path: Path) -> None:
    """Fails when the run shows a command line instead of the sentence, or leaves a release that looks whole."""
    sentence = "no nvcc at /opt/cuda-13.1/bin/nvcc: install CUDA 13.0 or set cuda_sm121_cuda_home to where it is"
    bed.on(bed.HEAD, "touch", f"{RELEASE}/refuse")
    pair.write(bed.HEAD, f"{RELEASE}/refuse", json.dumps({"schema": 1, "ok": False, "message": sentence}))
    failed = run(tmp_path)
    nothing = f"{bed.HEAD} has no kernels to give; mend what failed there and run again."
    assert failed.failures() == {bed.HEAD: [f"{bed.HEAD}: {sentence}"], bed.WORKER: [nothing]}
    for node in pair.NODES:
        assert bed.on(node, "ls", RELEASE).split() == (["calls", "refuse", "venv"] if node == bed.HEAD else ["venv"])


def test_each_node_compiles_modules_once_as_the_engine_s_user() -> None:
    """Fails when root makes files that the engine cannot write, when the environment is not the engine's, or twice."""
    variables = {
        "glm_profile": "gb10",
        "__glm_vllm_overlay_release_dir": RELEASE,
        "__glm_vllm_overlay_module_dir": MODULES,
    }
    first = pair.run_playbook("tests/pair/modules.yml", **variables)
    assert first.status == 0, first.failures()
    for node in pair.NODES:
        nvcc = "/usr/local/cuda-13.0/bin/nvcc"
        assert bed.on(node, "cat", f"{MODULES}/calls").strip() == f"glm-vllm 1 {nvcc}"
        assert bed.on(node, "stat", "--format=%U", MODULES, f"{MODULES}/modules.json").split() == ["glm-vllm"] * 2
    assert pair.run_playbook("tests/pair/modules.yml", **variables).total("changed") == {}


def rehearse(luggage: Path, current: int | None = None) -> pair.Run:
    """The role's tasks for an engine with a drafter; `current` as if a deployment of that number were served."""
    return pair.run_playbook(
        "tests/pair/rehearsal.yml",
        glm_profile="gb10",
        __glm_vllm_overlay_release_dir=RELEASE,
        __glm_vllm_overlay_cache_dir=CACHES,
        __glm_vllm_overlay_source={"id": "of-a-test", "archive": str(luggage / "release.tar")},
        __glm_vllm_overlay_number=7,
        __glm_vllm_overlay_plan={"current": current},
        __glm_vllm_overlay_speculator="dflash2",
        __glm_vllm_overlay_deployment_facts={"drafter": {"path": "/d"}},
    )


def caches(node: str) -> str:
    """SHA-256 of what a rehearsal left on a node."""
    return bed.on(
        node, "sh", "-c", f"cd {CACHES} && sha256sum rehearsal.json triton/k.cubin && sha256sum -c rehearsal.json"
    )


def test_an_engine_is_rehearsed_on_the_head_and_the_worker_gets_what_it_compiled(tmp_path: Path) -> None:
    """Fails when the worker rehearses too, when root owns the caches, when a loss is not made good, or twice."""
    first = rehearse(tmp_path)
    assert first.status == 0, first.failures()
    (call,) = bed.on(bed.HEAD, "cat", f"{CACHES}/calls").splitlines()
    arguments = "--rehearsal=/var/lib/glm-vllm/deployments/7/serve.yaml --speculator=dflash2 --drafter=/d"
    assert call == f"glm-vllm build --json {arguments}"
    assert bed.on(bed.WORKER, "sh", "-c", f"ls {CACHES}").split() == ["rehearsal.json", "rehearsal.tar", "triton"]
    assert caches(bed.HEAD) == caches(bed.WORKER)
    for node in pair.NODES:
        owners = bed.on(node, "find", CACHES, "-printf", "%u\\n").split()
        assert set(owners) == {"glm-vllm"}
    assert rehearse(tmp_path).total("changed") == {}

    bed.on(bed.WORKER, "rm", "-r", f"{CACHES}/rehearsal.json", f"{CACHES}/triton")
    again = rehearse(tmp_path)
    assert set(again.changed()) == {bed.WORKER}
    assert caches(bed.HEAD) == caches(bed.WORKER)


@pytest.mark.full
def test_an_engine_that_does_not_get_through_costs_a_pause(tmp_path: Path) -> None:
    """Fails when what served stays stopped, when the worker goes on, or when the sentence is not the command's."""
    sentence = "the engine does not get through a rehearsal without weights (ValueError: no such backend)"
    for node in pair.NODES:
        bed.on(node, "install", "-d", "-o", "glm-vllm", CACHES)
    bed.on(bed.HEAD, "touch", f"{CACHES}/refuse")
    pair.write(bed.HEAD, f"{CACHES}/refuse", json.dumps({"schema": 1, "ok": False, "message": sentence}))
    before = {node: bed.on(node, "systemctl", "show", "-P", "InvocationID", pair.UNITS[node]) for node in pair.NODES}
    failed = rehearse(tmp_path, current=1)
    assert failed.failures()[bed.HEAD] == [f"{bed.HEAD}: {sentence}"]
    for node in pair.NODES:
        after = bed.on(node, "systemctl", "show", "-P", "InvocationID", pair.UNITS[node])
        assert after.strip() and after != before[node], "it was not stopped and started"
    pair.wait_until_serving()
