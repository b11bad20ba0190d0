"""One bed, converged once, for every test here. A test that breaks something mends it, whatever happens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ansible_runner
import bed
import pytest
import testinfra
from testinfra.host import Host


@dataclass
class Run:
    """One run of a playbook: exit status, totals by kind and host, and what ansible said about each task."""

    status: int
    stats: dict[str, dict[str, int]]
    events: list[dict[str, Any]] = field(repr=False)
    output: str = field(repr=False)

    def changed(self) -> dict[str, list[str]]:
        """Names of the tasks that changed something, by host."""
        found: dict[str, list[str]] = {}
        for event in self.events:
            data = event.get("event_data", {})
            if event["event"] == "runner_on_ok" and data.get("res", {}).get("changed"):
                found.setdefault(data["host"], []).append(data["task"])
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


def run_playbook(playbook: str, *arguments: str, timeout: int = 900, **variables: Any) -> Run:
    """Run a playbook on the twin; `arguments` go to ansible-playbook, `variables` become extra variables."""
    with tempfile.TemporaryDirectory() as private:
        runner = ansible_runner.run(
            private_data_dir=private,
            project_dir=str(bed.ROOT),
            playbook=playbook,
            inventory=bed.inventory(),
            cmdline=" ".join(arguments) or None,
            extravars=variables or None,
            envvars={"ANSIBLE_CONFIG": str(bed.ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            quiet=True,
            timeout=timeout,
        )
        events = list(runner.events)
        return Run(runner.rc, runner.stats or {}, events, "\n".join(e["stdout"] for e in events if e.get("stdout")))


@pytest.fixture(scope="session")
def playbook() -> Callable[..., Run]:
    """Runs a playbook on the twin."""
    return run_playbook


@pytest.fixture(scope="session", autouse=True)
def converged() -> Run:
    """The first run of site.yml on new machines; every test here stands on it."""
    bed.checkpoint("chain")
    bed.twin("up")
    run = run_playbook("site.yml")
    if run.status:
        pytest.exit(f"site.yml failed on new machines: {run.failures()}\n{run.output[-6000:]}", returncode=1)
    return run


def host(node: str) -> Host:
    return testinfra.get_host(f"ansible://{node}?ansible_inventory={bed.inventory()[-1]}&sudo=true")


@pytest.fixture(scope="session")
def head(converged: Run) -> Host:
    """The head, over ssh, as root."""
    return host(bed.HEAD)


@pytest.fixture(scope="session")
def worker(converged: Run) -> Host:
    """The worker, over ssh, as root."""
    return host(bed.WORKER)


@pytest.fixture
def endpoint(converged: Run) -> Iterator[bed.Endpoint]:
    """The API through the gateway, with the head's key."""
    with bed.Endpoint() as session:
        yield session
