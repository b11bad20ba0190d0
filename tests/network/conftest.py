# SPDX-License-Identifier: Apache-2.0
"""Two bare nodes with two cables between them, converged once. A test that needs them right has them mended first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bed
import cables
import pytest

PATIENCE = 900  # seconds a test, with the run that the first one waits for


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--standing", action="store_true", help="the bed stands already, and stays")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = ("test_cables", "test_changes", "test_networkmanager", "test_more_nodes")
    items.sort(key=lambda item: order.index(item.path.stem))
    for item in items:
        item.add_marker(pytest.mark.timeout(PATIENCE))


@pytest.fixture(scope="session")
def standing(pytestconfig: pytest.Config) -> Iterator[None]:
    """The nodes have power; away with them afterwards."""
    if pytestconfig.getoption("--standing"):
        yield
        return
    bed.twin("clean")
    bed.twin("up")
    yield
    bed.twin("clean")


@pytest.fixture(scope="session")
def untouched(standing: None) -> dict[str, str]:
    """The files of each node that say something about its network, before anything of ours ran; {} when it had."""
    found = {node: cables.files(node) for node in cables.NODES}
    return {} if any(Path(cables.OURS).name in text for text in found.values()) else found


@pytest.fixture(scope="session")
def first_run(untouched: dict[str, str]) -> cables.Run:
    """The first run of playbooks/network.yml."""
    run = cables.network()
    assert run.status == 0, run.failures()
    return run


@pytest.fixture
def others(first_run: cables.Run) -> None:
    """Both rails as somebody else configured them."""
    cables.mend()
    cables.take_over()


@pytest.fixture
def ours(first_run: cables.Run) -> None:
    """Both rails as we configure them, with both cables in port 1, whatever the test before did."""
    if cables.mend():
        run = cables.network()
        assert run.status == 0, run.failures()
