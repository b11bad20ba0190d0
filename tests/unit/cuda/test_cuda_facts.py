# SPDX-License-Identifier: Apache-2.0
"""Every thing that can be wrong with a Spark's GPU, driver or toolkit is named in one sentence with its remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from answers import answers, load  # noqa: E402

facts = load("cuda_facts")

HOME = "/usr/local/cuda-13.0"
# recorded from nvcc 13.0.88
VERSION = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:58:59_PM_PDT_2025
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.36424714_0"""


def test_a_good_spark() -> None:
    found, problems = facts.gpu(answers({"nvidia-smi": (0, "NVIDIA GB10, 12.1, 580.126.09")}), 580)
    assert found == {"name": "NVIDIA GB10", "capability": "12.1", "driver": "580.126.09"}
    assert problems == []


@pytest.mark.parametrize(
    ("status", "out", "says"),
    [
        (127, "", "nvidia-smi is not on PATH"),
        (0, "No devices were found", "does not answer (No devices were found)"),
        (6, "No devices were found", "does not answer (No devices were found)"),
        (
            18,
            "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.142",
            "reboot the node",
        ),
        (0, "", "does not answer (0)"),
        (0, "NVIDIA RTX PRO 6000, 12.0, 580.126.09", "The GPU is NVIDIA RTX PRO 6000"),
        (0, "NVIDIA GB10, 12.1, 580.126.09\nNVIDIA GB10, 12.1, 580.126.09", "The GPU is NVIDIA GB10, NVIDIA GB10"),
        (0, "NVIDIA GB10, 12.0, 580.126.09", "compute capability 12.0, not 12.1"),
        (0, "NVIDIA GB10, 12.1, 570.133.20", "The driver is 570.133.20, not of branch 580"),
        (0, "NVIDIA GB10, 12.1, 590.48.01", "The driver is 590.48.01, not of branch 580"),
    ],
)
def test_a_bad_gpu(status: int, out: str, says: str) -> None:
    _, problems = facts.gpu(answers({"nvidia-smi": (status, out)}), 580)
    assert len(problems) == 1 and says in problems[0]


def test_branch_is_compared_whole() -> None:
    _, problems = facts.gpu(answers({"nvidia-smi": (0, "NVIDIA GB10, 12.1, 5801.1")}), 580)
    assert len(problems) == 1


def test_two_faults_are_two_sentences() -> None:
    _, problems = facts.gpu(answers({"nvidia-smi": (0, "NVIDIA GB10, 12.0, 570.1")}), 580)
    assert len(problems) == 2


def nvcc(version: str = VERSION, dryrun: tuple[int, str] = (0, "")) -> tuple[str, list[str]]:
    program = f"{HOME}/bin/nvcc"
    return facts.nvcc(answers({f"{program} --version": (0, version), f"{program} --dryrun": dryrun}), HOME)


def test_a_good_toolkit() -> None:
    assert nvcc() == ("13.0", [])


@pytest.mark.parametrize("release", ["12.9", "14.0", "9.2"])
def test_releases_out_of_range(release: str) -> None:
    found, problems = nvcc(VERSION.replace("release 13.0", f"release {release}"))
    assert found == release and len(problems) == 1 and f"is {release}: this needs 13.0" in problems[0]


@pytest.mark.parametrize("release", ["13.0", "13.5", "13.10"])
def test_releases_in_range(release: str) -> None:
    assert nvcc(VERSION.replace("release 13.0", f"release {release}"))[1] == []


def test_nvcc_without_the_architecture() -> None:
    _, problems = nvcc(dryrun=(1, "nvcc fatal   : Unsupported gpu architecture 'sm_121a'"))
    assert len(problems) == 1 and "does not know sm_121a (nvcc fatal" in problems[0]


def test_no_nvcc_and_a_broken_one() -> None:
    assert "does not exist" in facts.nvcc(answers({}), HOME)[1][0]
    assert "does not answer as nvcc does" in nvcc(version="Segmentation fault")[1][0]


def test_missing_headers_and_programs(tmp_path: Path) -> None:
    home = tmp_path / "cuda"
    assert len(facts.missing(str(home), "3.12", False, tmp_path)) == 1
    (home / "include").mkdir(parents=True)
    (home / "include" / "cuda_runtime.h").touch()
    assert facts.missing(str(home), "3.12", False, tmp_path) == []
    problems = facts.missing(str(home), "3.12", True, tmp_path)
    assert [p.split(" is missing")[0].rsplit("/", 1)[-1] for p in problems] == ["Python.h", "g++", "ninja"]
    assert "libpython3.12-dev" in problems[0]


def test_python_is_the_one_behind_the_link(tmp_path: Path) -> None:
    (tmp_path / "python3.12").touch()
    (tmp_path / "python3").symlink_to("python3.12")
    assert facts.system_python(tmp_path / "python3") == "3.12"


def test_packages_to_hold() -> None:
    listing = "\n".join(
        f"{name} {status}"
        for name, status in [
            ("nvidia-driver-580-open", "installed"), ("libnvidia-compute-580", "installed"),
            ("nvidia-modprobe", "installed"),
            ("xserver-xorg-video-nvidia-580", "installed"), ("nvidia-driver-570", "installed"),
            ("nvidia-firmware-5801", "installed"),
            ("nvidia-utils-580", "config-files"), ("nvidia-container-toolkit", "installed"),
            ("linux-modules-nvidia-580-open-6.17.0-1014-nvidia", "installed"), ("bash", "installed"),
        ]
    )  # fmt: skip
    assert facts.driver_packages(answers({"dpkg-query": (0, listing)}), 580) == [
        "libnvidia-compute-580", "nvidia-driver-580-open", "nvidia-modprobe", "xserver-xorg-video-nvidia-580",
    ]  # fmt: skip


def process(proc: Path, pid: int, cgroup: str, pss_kib: int) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"0::{cgroup}\n")
    (folder / "smaps_rollup").write_text(f"Rss:  {pss_kib * 2} kB\nPss:  {pss_kib} kB\nPss_Anon:  7 kB\n")


def test_what_a_desktop_costs(tmp_path: Path) -> None:
    process(tmp_path, 10, "/system.slice/gdm.service", 2**20)
    process(tmp_path, 11, "/user.slice/user-1000.slice/user@1000.service/session.slice/gnome-shell.service", 2**20)
    process(tmp_path, 12, "/user.slice/user-1000.slice/session-2.scope", 2**19)
    process(tmp_path, 13, "/user.slice/user-1001.slice/session-5.scope", 2**20)  # a login over ssh
    process(tmp_path, 14, "/system.slice/gdm.service.d", 2**20)  # only looks like it
    (tmp_path / "15").mkdir()  # has ended
    run = answers(
        {
            "systemctl get-default": (0, "graphical.target"),
            "systemctl list-units": (0, "display-manager.service loaded active running GNOME Display Manager"),
            "systemctl show -P Id": (0, "gdm.service"),
            "loginctl list-sessions": (0, "2 1000 ada seat0 tty2\n5 1001 bob  -"),
            "loginctl show-session 2": (0, "Type=wayland\nScope=session-2.scope\nUser=1000"),
            "loginctl show-session 5": (0, "Type=tty\nScope=session-5.scope\nUser=1001"),
        }
    )
    assert facts.desktop(run, tmp_path) == {
        "target": "graphical.target",
        "units": ["gdm.service", "session-2.scope", "user@1000.service"],
        "gib": 2.5,
    }


def test_no_desktop_costs_nothing(tmp_path: Path) -> None:
    process(tmp_path, 10, "/system.slice/ssh.service", 2**20)
    run = answers({"systemctl get-default": (0, "multi-user.target"), "systemctl list-units": (0, "")})
    assert facts.desktop(run, tmp_path) == {"target": "multi-user.target", "units": [], "gib": 0.0}


@pytest.mark.parametrize("name", ["cuda_facts", "swap", "holders", "footprint"])
def test_documentation_says_what_the_module_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    yaml = pytest.importorskip("yaml")
    module = load(name)
    taken = {}

    class Stop(Exception):
        pass

    def capture(argument_spec: dict[str, dict[str, object]], **_: object) -> None:
        taken.update(argument_spec)
        raise Stop

    monkeypatch.setattr(module, "AnsibleModule", capture)
    with pytest.raises(Stop):
        module.main()
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    assert set(documented) == set(taken)
    for option, spec in taken.items():
        for key in ("type", "default", "required", "elements"):
            assert documented[option].get(key, False if key == "required" else None) == spec.get(
                key, False if key == "required" else None
            ), f"{name}.{option}.{key}"
        assert sorted(map(str, documented[option].get("choices", []))) == sorted(map(str, spec.get("choices", [])))
