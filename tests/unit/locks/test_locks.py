"""What every lock must be: pinned, hashed, and free of anybody's addresses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LOCKS = Path(__file__).parents[3] / "files/locks"
FILES = sorted(LOCKS.glob("*.txt"))


def entries(file: Path) -> dict[str, str]:
    """Package -> its whole entry, continuation lines joined."""
    joined = re.sub(r"\\\n\s*", " ", file.read_text())
    rows = [row for row in joined.splitlines() if row.strip() and not row.startswith("#")]
    return {re.split(r"[=\s\[]", row)[0].lower(): row for row in rows}


def test_the_locks_are_here():
    names = {file.name for file in FILES}
    assert {
        "gb10-cp312-aarch64.txt",
        "build-x86_64.txt",
        "twin-cp311-x86_64.txt",
        "twin-cp312-x86_64.txt",
    } <= names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_each_entry_is_pinned_with_a_hash(file):
    for name, row in entries(file).items():
        assert re.match(r"^[A-Za-z0-9._-]+(\[[a-z0-9,_-]+\])?==[^\s;]+", row), f"{name} is not pinned with =="
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", row), f"{name} has no hash"


@pytest.mark.parametrize("file", [*FILES, *sorted(LOCKS.glob("*.in"))], ids=lambda file: file.name)
def test_no_lock_names_an_address(file):
    text = file.read_text()
    assert "://" not in text
    assert not re.search(r"(?m)^\s*(-i|-f|--index|--extra-index-url|--find-links|--trusted-host)\b", text)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        ("vllm", "0.33.0"),
        ("flashinfer-python", "0.7.2.post1"),
        ("exllamav3", "1.6.5"),
        ("ray", "2.60.0"),
        ("torch", "2.14.0"),
    ],
)
def test_the_closure_of_a_gb10(package, version):
    assert entries(LOCKS / "gb10-cp312-aarch64.txt")[package].startswith(f"{package}=={version} ")


def test_kernels_are_built_from_what_is_served():
    gb10, build = entries(LOCKS / "gb10-cp312-aarch64.txt"), entries(LOCKS / "build-x86_64.txt")
    for package in ("vllm", "exllamav3", "nvidia-cuda-runtime", "nvidia-cublas", "nvidia-cusparse", "nvidia-cusolver"):
        assert gb10[package].split()[0] == build[package].split()[0]


def test_a_gb10_compiles_with_the_distributions_toolkit():
    build = entries(LOCKS / "build-x86_64.txt")
    for package in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt"):
        assert build[package].startswith(f"{package}==13.0.")
