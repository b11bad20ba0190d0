"""The twin's checkpoints, each built once a session."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """Builder of checkpoints: checkpoint("chain") is its folder."""
    from glm_vllm_twin.checkpoint.build import build

    root, built = tmp_path_factory.mktemp("models"), {}

    def get(kind: str) -> Path:
        if kind not in built:
            build(kind, root / kind)
            built[kind] = root / kind
        return built[kind]

    return get
