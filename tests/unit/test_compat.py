"""A hook is installed beside the very files that it was written for, or not at all."""

import hashlib

import pytest
from glm_vllm_overlay.hooks import compat
from glm_vllm_overlay.node.errors import Refusal


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A vLLM of one file, which two hooks rely on; returns the file."""
    file = tmp_path / "v1/engine.py"
    file.parent.mkdir()
    file.write_text("one = 1\n")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    known = {"1.0": {"v1/engine.py": (digest, ("plan", "cache"))}, "2.0": {"v1/engine.py": ("0" * 64, ("cache",))}}
    monkeypatch.setattr(compat, "FILES", known)
    monkeypatch.setattr(compat, "folder", lambda: tmp_path)
    monkeypatch.setattr(compat, "version", lambda: "1.0")
    return file


def test_the_files_that_it_was_written_for(vllm):
    compat.require("plan")
    compat.require("cache")
    assert compat.knows("plan") and not compat.knows("scheduler")


def test_another_byte(vllm):
    vllm.write_text("one = 2\n")
    with pytest.raises(Refusal, match=r"vllm/v1/engine.py is not the file of vLLM 1.0 that plan was written for"):
        compat.require("plan")


def test_another_version(vllm, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda: "3.0")
    with pytest.raises(Refusal, match="cache was written for vLLM 1.0 and 2.0, and this is 3.0"):
        compat.require("cache")
    assert not compat.knows("cache")


def test_a_version_that_another_hook_knows(vllm, monkeypatch):
    monkeypatch.setattr(compat, "version", lambda: "2.0")
    with pytest.raises(Refusal, match="plan was written for vLLM 1.0"):
        compat.require("plan")


def test_a_build_of_a_version_is_that_version(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.33.0+cu130")
    assert compat.version() == "0.33.0"
