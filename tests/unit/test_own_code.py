# SPDX-License-Identifier: Apache-2.0
"""The one way in which a plugin reaches another Python file of ours."""

from __future__ import annotations

from pathlib import Path

import own_code
import pytest


def test_a_file_is_executed_once_and_knows_its_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataclass with postponed annotations looks its module up while the file is executed."""
    monkeypatch.setattr(own_code, "REPOSITORY", tmp_path)
    lines = ["from __future__ import annotations", "from dataclasses import dataclass", "open('once', 'x').close()"]
    (tmp_path / "rails.py").write_text("\n".join([*lines, "@dataclass", "class Rail:", "    name: str"]))
    monkeypatch.chdir(tmp_path)
    assert own_code.load("rails.py").Rail("a").name == "a"
    assert own_code.load("rails.py") is own_code.load("rails.py")


def test_a_file_that_fails_is_not_left_half_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_code, "REPOSITORY", tmp_path)
    (tmp_path / "half.py").write_text("first = 1\nraise ValueError('second')\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="second"):
            own_code.load("half.py")
    with pytest.raises(OSError):
        own_code.load("absent.py")


def test_no_plugin_has_a_loader_of_its_own() -> None:
    plugins = Path(own_code.__file__).parents[1]
    found = [str(file.relative_to(plugins)) for file in plugins.glob("*/*.py") if "spec_from_file" in file.read_text()]
    assert found == ["controller/own_code.py"]
