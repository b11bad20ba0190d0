"""A release's name follows from its content and from nothing else."""

import importlib.util
import os
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "release_source", Path(__file__).parents[2] / "plugins/action/release_source.py"
)
release_source = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release_source)


@pytest.fixture
def package(tmp_path):
    root = tmp_path / "overlay"
    (root / "src").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "src/a.py").write_text("A = 1\n")
    return root


def identity(root, lock="lock"):
    return release_source.release_id(release_source.pack({"overlay": root}), lock, "python3")


def test_times_modes_and_caches_do_not_matter(package):
    before = identity(package)
    os.utime(package / "src/a.py", (1, 1))
    (package / "src/a.py").chmod(0o600)
    (package / "src/__pycache__").mkdir()
    (package / "src/__pycache__/a.pyc").write_bytes(b"x")
    (package / "src/overlay.egg-info").mkdir()
    (package / "src/overlay.egg-info/PKG-INFO").write_text("x")
    assert identity(package) == before


@pytest.mark.parametrize("name", ["README.md", "lock.sh", "benchmarks/moe.py", "other/pyproject.toml"])
def test_what_is_not_installed_does_not_matter(package, name):
    before = identity(package)
    (package / name).parent.mkdir(exist_ok=True)
    (package / name).write_text("x")
    assert identity(package) == before


@pytest.mark.parametrize("change", ["content", "name", "lock", "pyproject.toml", "csrc/kernel.cu"])
def test_content_name_and_lock_matter(package, change):
    before = identity(package)
    lock = "lock"
    if change == "content":
        (package / "src/a.py").write_text("A = 2\n")
    elif change == "name":
        (package / "src/a.py").rename(package / "src/b.py")
    elif change == "lock":
        lock = "other"
    else:
        (package / change).parent.mkdir(exist_ok=True)
        (package / change).write_text("x")
    assert identity(package, lock) != before


def test_archive_holds_the_files(package):
    with tarfile.open(fileobj=BytesIO(release_source.pack({"overlay": package}))) as tar:
        assert sorted(tar.getnames()) == ["overlay/pyproject.toml", "overlay/src/a.py"]
