"""The nodes that the tests of the doctor change."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundles import Bundle, healthy
from variants import VARIANTS


@pytest.fixture
def bundle(tmp_path) -> Bundle:
    """The first node of a healthy pair."""
    return healthy(tmp_path / "spark-a")


@pytest.fixture
def pair(tmp_path) -> tuple[Bundle, Bundle]:
    """Both nodes of a healthy pair, in one folder."""
    return healthy(tmp_path / "pair/spark-a"), healthy(tmp_path / "pair/spark-b", other=True)


@pytest.fixture(scope="session")
def every_variant(tmp_path_factory) -> dict[str, tuple[Path, set[str]]]:
    """Title to (folder, expected findings) of every variant; tests only read them."""
    root = tmp_path_factory.mktemp("variants")
    return {title: (make(root / str(n)), found) for n, (title, (make, found)) in enumerate(VARIANTS.items())}
