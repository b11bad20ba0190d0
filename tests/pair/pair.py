"""What the tests of the pair share: runs of playbooks, waiting, breaking and mending."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ansible_runner
import bed
import requests

WHEEL = "cachetools"  # any package of the lock will do; a small one is quick to spoil
BUILT = (".git", ".venv", ".venv-engine", ".cache", "__pycache__", "*.egg-info", "build")
NODES = (bed.HEAD, bed.WORKER)
UNITS = {bed.HEAD: "glm-vllm-head", bed.WORKER: "glm-vllm-worker"}
QUESTION = "What joins the two machines?"
ANSWER = "Two small machines, one cable, one answer."  # the chain checkpoint spells nothing else


@dataclass
class Run:
    """One run of a playbook: exit status, totals by kind and host, and what ansible said about each task."""

    status: int
    stats: dict[str, dict[str, int]]
    events: list[dict[str, Any]] = field(repr=False)
    output: str = field(repr=False)
    seconds: float

    def results(self, *kinds: str) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
        """(host, task, module, result) of every event of these kinds; a loop's items one by one."""
        for event in self.events:
            if event["event"] in kinds:
                data = event["event_data"]
                yield data["host"], data["task"], data["task_action"], data.get("res", {})

    def changed(self) -> dict[str, list[str]]:
        """Names of the tasks that changed something, by host."""
        found: dict[str, list[str]] = {}
        for host, task, _, result in self.results("runner_on_ok"):
            if result.get("changed"):
                found.setdefault(host, []).append(task)
        return found

    def differences(self) -> list[str]:
        """Every difference that --diff showed, as `host: task: what`."""
        found = []
        for host, task, _, result in self.results("runner_on_ok", "runner_item_on_ok"):
            diffs = result.get("diff") or []
            for diff in diffs if isinstance(diffs, list) else [diffs]:
                if diff.get("prepared") or diff.get("before", "") != diff.get("after", ""):
                    found.append(f"{host}: {task}: {diff}")
        return found

    def failures(self) -> dict[str, list[str]]:
        """Messages of failed tasks and of hosts that cannot be reached, by host."""
        found: dict[str, list[str]] = {}
        for event in self.events:
            data = event.get("event_data", {})
            failed = event["event"] == "runner_on_failed" and not data.get("ignore_errors")
            if failed or event["event"] == "runner_on_unreachable":
                found.setdefault(data["host"], []).append(str(data["res"].get("msg", "")))
        return found

    def total(self, kind: str) -> dict[str, int]:
        """The recap's column `kind` (changed, failures, dark, ignored, ...) for hosts that are not 0 there."""
        return {host: number for host, number in self.stats.get(kind, {}).items() if number}


def run_playbook(
    playbook: str,
    *arguments: str,
    project: Path = bed.ROOT,
    inventory: list[str] | None = None,
    timeout: int = 900,
    **variables: Any,
) -> Run:
    """Run a playbook of `project` on the twin, or on `inventory`; `arguments` go to ansible-playbook, `variables` are
    extra variables."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as private:
        runner = ansible_runner.run(
            private_data_dir=private,
            project_dir=str(project),
            playbook=playbook,
            inventory=inventory or bed.inventory(),
            cmdline=shlex.join(arguments) or None,
            extravars=variables or None,
            envvars={"ANSIBLE_CONFIG": str(project / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            quiet=True,
            timeout=timeout,
        )
        events, stats = list(runner.events), runner.stats or {}
    output = "\n".join(e["stdout"] for e in events if e.get("stdout"))
    return Run(runner.rc, stats, events, output, time.monotonic() - start)


def answer() -> str:
    """What the pair says to QUESTION, through the gateway."""
    with bed.Endpoint() as endpoint:
        reply = endpoint.chat(QUESTION, temperature=0, max_tokens=64)
    return reply["choices"][0]["message"]["content"].strip()


def health() -> int:
    """Status of GET /health through the gateway; 0 when nobody listens."""
    try:
        with bed.Endpoint(key="") as endpoint:
            return endpoint.get("/health", timeout=10).status_code
    except requests.RequestException:
        return 0


def wait_for(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Ask again and again until the answer is true, and return it; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(1)
    return found


def wait_until_serving(seconds: float = 400) -> None:
    """Wait for /health, then for the exact answer: nobody touched the pair's content meanwhile."""
    wait_for(lambda: health() == 200, seconds, "the pair serves")
    assert answer() == ANSWER


def show(node: str, unit: str, *properties: str) -> dict[str, str]:
    """`systemctl show` of a unit on a node, asked without any network."""
    said = bed.on(node, "systemctl", "show", f"--property={','.join(properties)}", unit)
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


def starts() -> dict[str, str]:
    """The invocation of each node's engine: another one means that it was restarted."""
    return {node: show(node, unit, "InvocationID")["InvocationID"] for node, unit in UNITS.items()}


@contextlib.contextmanager
def service_untouched() -> Iterator[None]:
    """Whatever happens inside, both engines go on with the start that they had, and answer as before."""
    before = starts()
    assert all(before.values()), f"an engine does not run: {before}"
    yield
    assert starts() == before
    assert answer() == ANSWER


@contextlib.contextmanager
def replaced(node: str, path: str, change: Callable[[str], str], *then: str) -> Iterator[None]:
    """A file of a node with other content, inside; `then` is a command run after each change, on the node."""
    before = bed.on(node, "cat", path)
    after = change(before)
    assert after != before, f"the break changes nothing in {path}"
    try:
        write(node, path, after)
        if then:
            bed.on(node, *then)
        yield
    finally:
        write(node, path, before)
        if then:
            bed.on(node, *then)


def write(node: str, path: str, text: str) -> None:
    """Put text into a file that exists, in place: owner, mode and links stay."""
    bed.on(node, "sh", "-c", 'printf %s "$1" > "$2"', "write", text, path)


def probe(*arguments: str) -> dict[str, Any]:
    """`glm-vllm probe --json` on the head, as playbooks/smoke.yml asks it."""
    said = bed.on(bed.HEAD, "sh", "-c", 'glm-vllm probe --json "$@" || [ $? = 1 ]', "probe", *arguments, timeout=500)
    return json.loads(said.splitlines()[-1])


def other_release(folder: Path) -> Path:
    """A copy of this project in `folder` whose release is one that was never built before."""
    project = folder / "project"
    shutil.copytree(bed.ROOT, project, ignore=shutil.ignore_patterns(*BUILT), symlinks=True)
    with (project / "files/overlay/src/glm_vllm_overlay/__init__.py").open("a") as file:
        file.write(f"# {uuid.uuid4()}\n")
    return project


@contextlib.contextmanager
def wrong_wheel(node: str) -> Iterator[None]:
    """Inside, one wheel that a node would install is not what the lock says: a file more, under the right name.

    What the installer has kept of the right one is out of its reach meanwhile.
    """
    wheel = bed.on(node, "sh", "-c", f"ls /srv/wheels/{WHEEL}-*.whl").strip()
    add = "import zipfile; zipfile.ZipFile('/root/spoilt', 'a').writestr('spoilt.txt', '')"
    spoil = (
        f'cp "$1" /root/spoilt && python3 -c "{add}" && mount --bind /root/spoilt "$1" '
        "&& mv /opt/glm-vllm/uv-cache /opt/glm-vllm/uv-kept"
    )
    mend = 'umount "$1"; rm -rf /root/spoilt /opt/glm-vllm/uv-cache && mv /opt/glm-vllm/uv-kept /opt/glm-vllm/uv-cache'
    try:
        bed.on(node, "sh", "-c", spoil, "spoil", wheel)
        yield
    finally:
        bed.on(node, "sh", "-c", mend, "mend", wheel)
