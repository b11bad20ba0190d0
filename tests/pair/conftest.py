"""One bed, converged once, for every test here. A test that breaks something mends it, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import bed
import disk
import pair
import pytest
import testinfra
from testinfra.host import Host

# Reading first, breaking then; those that restart engines last.
ORDER = (
    "test_site",
    "test_nodes",
    "test_api",
    "test_doors",
    "test_smoke",
    "test_support",
    "test_kernels",
    "test_bad_input",
    "test_together",
    "test_ray",
)
PATIENCE = 1800  # seconds a test, with the converge that the first one waits for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--standing", action="store_true", help="the pair stands already: neither make nor converge it")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.stem))
    for item in items:
        item.add_marker(pytest.mark.timeout(PATIENCE))


@pytest.fixture(scope="session")
def standing(pytestconfig: pytest.Config) -> bool:
    """Whether somebody else has converged the pair."""
    return pytestconfig.getoption("--standing")


@pytest.fixture(scope="session")
def bare(standing: bool) -> dict[str, disk.Disk]:
    """What stood on each node before anything ran."""
    if standing:
        pytest.skip("needs new machines")
    bed.checkpoint("chain")
    bed.twin("up")
    return {node: disk.read(node) for node in pair.NODES}


@pytest.fixture(scope="session")
def foretold(bare: dict[str, disk.Disk]) -> pair.Run:
    """`site.yml --check --diff` on new machines."""
    return pair.run_playbook("site.yml", "--check", "--diff")


@pytest.fixture(scope="session")
def after_check(foretold: pair.Run) -> dict[str, disk.Disk]:
    """What stood on each node after that."""
    return {node: disk.read(node) for node in pair.NODES}


@pytest.fixture(scope="session")
def first_run(after_check: dict[str, disk.Disk]) -> pair.Run:
    """The first run of site.yml; without it there is nothing to test."""
    run = pair.run_playbook("site.yml", timeout=1500)
    if run.status:
        pytest.exit(f"site.yml failed on new machines: {run.failures()}\n{run.output[-6000:]}", returncode=1)
    return run


@pytest.fixture(scope="session", autouse=True)
def converged(request: pytest.FixtureRequest, standing: bool) -> None:
    """The pair serves."""
    if not standing:
        request.getfixturevalue("first_run")


@pytest.fixture(scope="session")
def playbook() -> Callable[..., pair.Run]:
    """Runs a playbook on the twin."""
    return pair.run_playbook


def host(node: str) -> Host:
    """A node over ssh, as root."""
    return testinfra.get_host(f"ssh://{node}", ssh_config=str(bed.STATE / "run/ssh_config"), sudo=True)


@pytest.fixture(scope="session")
def head(converged: None) -> Host:
    """The head, over ssh, as root."""
    return host(bed.HEAD)


@pytest.fixture(scope="session")
def worker(converged: None) -> Host:
    """The worker, over ssh, as root."""
    return host(bed.WORKER)


@pytest.fixture(params=pair.NODES)
def node(request: pytest.FixtureRequest, head: Host, worker: Host) -> Host:
    """Each node in its turn."""
    return {bed.HEAD: head, bed.WORKER: worker}[request.param]


@pytest.fixture
def endpoint(converged: None) -> Iterator[bed.Endpoint]:
    """The API through the gateway, with the head's key."""
    with bed.Endpoint() as session:
        yield session
