"""tools/finding_docs.py, run as `make docs` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from glm_vllm_overlay.node import findings

REPOSITORY = Path(__file__).parents[3]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, REPOSITORY / "tools/finding_docs.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_committed_table_is_up_to_date():
    done = run("--check")
    assert done.returncode == 0, done.stderr


def test_every_id_has_a_row_and_the_rest_of_the_page_stays(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- findings: made by `make docs` -->\nSTALE ROW\n<!-- end of findings -->\nAfter.\n")
    assert run("--page", page, "--check").returncode == 1
    assert run("--page", page).returncode == 0
    text = page.read_text()
    assert text.startswith("Before.\n") and text.endswith("After.\n") and "STALE ROW" not in text
    assert all(f"\n| {kind.id} | " in text for kind in findings.TABLE)
    assert run("--page", page, "--check").returncode == 0


def test_a_page_without_the_markers_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    done = run("--page", page)
    assert done.returncode == 1
    assert "needs the lines" in done.stderr
