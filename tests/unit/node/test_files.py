"""Small files are replaced whole, and never through somebody else's link."""

from __future__ import annotations

import os

from glm_vllm_overlay.node.files import write_atomically


def test_the_text_and_the_mode_arrive(tmp_path):
    write_atomically(tmp_path / "a", "old\n")
    write_atomically(tmp_path / "a", "new\n", 0o600)
    assert (tmp_path / "a").read_text() == "new\n" and (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_planted_link_is_not_followed(tmp_path):
    """The gate writes as root into the folder of the engine's user, who may foresee a process id."""
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / f".a.{os.getpid()}").symlink_to(victim)
    write_atomically(folder / "a", "text")
    assert victim.read_text() == "untouched" and (folder / "a").read_text() == "text"
