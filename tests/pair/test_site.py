"""site.yml on new machines: foretold, done, done again."""

from __future__ import annotations

import fnmatch
import re

import bed
import disk
import pair
import pytest


def exceptions() -> dict[str, str]:
    """Pattern of a thing to the reason why it can't be foretold, from the table of docs/check-mode.md."""
    text = (bed.ROOT / "docs/check-mode.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE))


def test_check_mode_fails_nowhere_and_changes_nothing(
    foretold: pair.Run, bare: dict[str, disk.Disk], after_check: dict[str, disk.Disk]
) -> None:
    """Fails when a step needs what an earlier step would have made, or writes although it is only asked."""
    assert foretold.status == 0, foretold.failures()
    assert not any(foretold.total(kind) for kind in ("failures", "dark", "ignored", "rescued"))
    for node in pair.NODES:
        assert after_check[node].things == bare[node].things


def test_what_check_mode_foretells_is_what_the_run_creates(
    foretold: pair.Run, first_run: pair.Run, after_check: dict[str, disk.Disk]
) -> None:
    """Fails when a thing comes that was not foretold, when one doesn't come, or when an exception is not needed."""
    surprises, used = [], set()
    for node in pair.NODES:
        said = disk.foretold(foretold, node)
        now = disk.read(node)
        came = now.created_since(after_check[node])
        assert len(said) > 30 and len(came) > 30, "the lists are too short to be right"
        wrong = {thing for thing in came if not disk.covered(thing, said)}
        wrong |= {f"not {thing}" for thing in said if thing.split()[0] in disk.KINDS and thing not in now.things}
        for thing in wrong:
            pattern = next((p for p in exceptions() if fnmatch.fnmatchcase(thing, p)), None)
            if pattern:
                used.add(pattern)
            else:
                surprises.append(f"{node}: {thing}")
    assert not surprises, "\n".join(sorted(surprises)[:40])
    assert used == set(exceptions()), "docs/check-mode.md lists exceptions that are none"
    assert len(used) <= 10


def test_first_run_ends_with_an_answer(first_run: pair.Run) -> None:
    """Fails when any task fails or is passed over, or when the two ranks do not say what the checkpoint spells."""
    assert first_run.status == 0
    assert not any(first_run.total(kind) for kind in ("failures", "dark", "ignored"))
    before = bed.state_from_now(bed.WORKER)
    assert [pair.answer() for _ in range(3)] == [pair.ANSWER] * 3
    after = bed.state_from_now(bed.WORKER)
    assert after["rank"]["cpu_seconds"] > before["rank"]["cpu_seconds"], "rank 1 took no part"
    carried = [sum(r["rx_bytes"] + r["tx_bytes"] for r in s["fabric"]["rails"]) for s in (before, after)]
    assert carried[1] > carried[0], "nothing crossed the cable"


def test_first_run_shows_its_key_once_and_on_the_terminal_only(first_run: pair.Run) -> None:
    """Fails when a callback, a diff or an argument repeats the key."""
    key = bed.api_key()
    shown = [event for event in first_run.events if key in event.get("stdout", "")]
    assert len(shown) == 1 and "curl" in shown[0]["stdout"]
    assert all(key not in str(event["event_data"]) for event in first_run.events)


def test_second_run_changes_nothing(first_run: pair.Run) -> None:
    """Fails for every task that says `changed` although all is as it should be."""
    with pair.service_untouched():
        second = pair.run_playbook("site.yml")
    assert second.status == 0, second.failures()
    assert second.changed() == {}
    assert second.total("changed") == {}


def test_check_on_the_converged_pair_shows_no_difference(first_run: pair.Run) -> None:
    """Fails when a task foretells a change that a run would not make."""
    run = pair.run_playbook("site.yml", "--check", "--diff")
    assert run.status == 0, run.failures()
    assert run.changed() == {}
    assert run.differences() == []


@pytest.mark.parametrize("name", ["status", "smoke"])
def test_day_two_playbooks_read_only(name: str) -> None:
    """Fails when looking changes something or does not work."""
    run = pair.run_playbook(f"playbooks/{name}.yml")
    assert run.status == 0, run.failures()
    assert run.changed() == {}


def test_status_shows_both_nodes() -> None:
    """Fails when the one screen lacks a node, the release, the executor or the phase."""
    said = bed.on(bed.HEAD, "glm-vllm", "status")
    release = bed.state(bed.HEAD)["release"]
    for words in (*pair.NODES, release, "serving", "mp", "mtp"):
        assert words in said
    assert said.count("serving") == said.count(release) == 2
