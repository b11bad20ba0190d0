# SPDX-License-Identifier: Apache-2.0
"""Swap: what is found, what is made a comment, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from answers import answers, load  # noqa: E402

swap = load("swap")

SWAPS = """Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority
/swap.img                               file\t\t16777212\t1024\t\t-2
/mnt/my\\040swap                         file\t\t1048572\t0\t\t-3
"""
FSTAB = """# <file system> <mount point> <type>
UUID=0000 / ext4 defaults 0 1
/swap.img\tnone\tswap\tsw\t0\t0
  /dev/sdb2 none swap sw
# /old none swap sw 0 0
/data/swap /swap ext4 defaults 0 0
tmpfs /tmp tmpfs defaults"""


def area(device: str, used_kib: int = 0) -> dict[str, object]:
    return {"device": device, "size_kib": 16777212, "used_kib": used_kib}


def test_active_areas() -> None:
    assert swap.active(SWAPS) == [
        {"device": "/swap.img", "size_kib": 16777212, "used_kib": 1024},
        {"device": "/mnt/my swap", "size_kib": 1048572, "used_kib": 0},
    ]
    assert swap.active("Filename\tType\tSize\tUsed\tPriority\n") == []


def test_only_lines_of_type_swap_become_comments() -> None:
    changed = swap.without_swap(FSTAB)
    different = [line for line, old in zip(changed.splitlines(), FSTAB.splitlines(), strict=True) if line != old]
    assert different == ["#glm-vllm# /swap.img\tnone\tswap\tsw\t0\t0", "#glm-vllm#   /dev/sdb2 none swap sw"]
    assert not changed.endswith("\n")
    assert swap.without_swap(changed) == changed


def test_units_that_bring_swap_back() -> None:
    run = answers(
        {
            "systemd-escape --path --suffix=swap /dev/zram0": (0, "dev-zram0.swap"),
            "systemd-escape --path --suffix=swap /dev/sda3": (0, "dev-sda3.swap"),
            "systemctl show -P SourcePath dev-zram0.swap": (0, ""),
            "systemctl show -P SourcePath dev-sda3.swap": (0, "/etc/fstab"),
            "systemctl list-unit-files": (0, "extra.swap enabled enabled\nidle.swap disabled enabled"),
            "systemctl is-enabled": (1, "generated"),
            "systemctl is-enabled zramswap.service": (0, "enabled"),
            "systemctl is-enabled extra.swap": (0, "enabled"),
        }
    )
    areas = [area("/swap.img"), area("/dev/zram0"), area("/dev/sda3")]
    assert swap.units(run, areas, FSTAB) == ["dev-zram0.swap", "extra.swap", "zramswap.service"]


def test_masked_units_are_done() -> None:
    run = answers({"systemd-escape": (0, "dev-zram0.swap"), "systemctl is-enabled": (1, "masked")})
    assert swap.units(run, [area("/dev/zram0")], "") == []


def test_full_swap_is_refused_and_an_empty_one_is_not() -> None:
    meminfo = "MemTotal: 127535084 kB\nMemAvailable: 2097152 kB\n"
    assert swap.problems([area("/swap.img", 2097151)], meminfo) == []
    (sentence,) = swap.problems([area("/swap.img", 2097152)], meminfo)
    assert "holds 2.0 GiB and only 2.0 GiB of memory are available" in sentence and "cuda_sm121_swap: keep" in sentence


def test_swapoff_that_fails_ends_it() -> None:
    calls: list[str] = []
    run = answers(
        {"swapoff /a": (0, ""), "swapoff /b": (255, "swapoff: /b: swapoff failed: Cannot allocate memory")}, calls
    )
    sentence = swap.turn_off(run, [area("/a"), area("/b"), area("/c")])
    assert sentence.startswith("Swap on /b cannot be turned off (swapoff: /b: swapoff failed: Cannot allocate memory)")
    assert calls == ["swapoff /a", "swapoff /b"]
    assert swap.turn_off(run, [area("/a")]) == ""
