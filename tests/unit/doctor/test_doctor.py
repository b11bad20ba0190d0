"""`glm-vllm doctor` over the recorded nodes and what can go wrong with them."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from bundles import diagnosed, healthy
from glm_vllm_overlay import cli
from glm_vllm_overlay.node import doctor, findings
from variants import TWINS, VARIANTS, append, link

SOURCES = Path(__file__).parents[3] / "files/overlay/src"


@pytest.mark.parametrize("title", VARIANTS)
def test_variant(every_variant, title):
    folder, expected = every_variant[title]
    assert diagnosed(folder) == expected


def detectors() -> list[tuple[str, str, int]]:
    """(id, kind of detector, its place) of every detector."""
    return [
        (kind.id, part, place)
        for kind in findings.TABLE
        for part in ("node", "pair", "alone")
        for place in range(len(getattr(kind, part)))
    ]


def hits(folder: Path) -> list[tuple[str, str, int]]:
    """The detectors that fire for a folder."""
    nodes = doctor.from_bundle(folder)
    found = []
    for kind in findings.TABLE:
        parts = [("node", nodes)] if len(nodes) > 1 else [("node", nodes), ("alone", nodes)]
        found += [
            (kind.id, part, place)
            for part, looked_at in parts
            for place, detector in enumerate(getattr(kind, part))
            if any(detector(node) for node in looked_at)
        ]
        if len(nodes) > 1:
            found += [(kind.id, "pair", place) for place, detector in enumerate(kind.pair) if detector(nodes)]
    return found


def test_every_detector_is_needed(every_variant, monkeypatch):
    """Mutation: without any one detector some variant's findings change."""
    by_detector: dict[tuple[str, str, int], list[str]] = {}
    for title, (folder, _) in every_variant.items():
        for one in hits(folder):
            by_detector.setdefault(one, []).append(title)
    before = {title: everything(folder) for title, (folder, _) in every_variant.items()}
    useless, whole = [], findings.TABLE
    for one in detectors():
        name, part, place = one
        table = list(whole)
        at = next(index for index, kind in enumerate(table) if kind.id == name)
        left = tuple(d for index, d in enumerate(getattr(table[at], part)) if index != place)
        table[at] = dataclasses.replace(table[at], **{part: left})
        monkeypatch.setattr(findings, "TABLE", tuple(table))
        titles = by_detector.get(one, [])
        if all(everything(every_variant[title][0]) == before[title] for title in titles):
            useless.append(one)
    assert not useless


def everything(folder: Path) -> list[tuple[str, str]]:
    """(id, severity) of all findings."""
    return [(one["id"], one["severity"]) for one in doctor.diagnose(doctor.from_bundle(folder))]


def test_enough_variants():
    assert len(VARIANTS) >= 60


def test_no_healthy_bundle_is_stopped(every_variant):
    for title, (folder, _) in every_variant.items():
        if "healthy" in title:
            assert not any(one.endswith("stop") for one in diagnosed(folder)), title


# ---- the table -------------------------------------------------------------------------------------------------------


def test_the_table_holds_every_id_once_and_in_order():
    expected = [f"F{number:02}" for number in range(1, 75)] + [f"R{number}" for number in range(1, 11)]
    assert [kind.id for kind in findings.TABLE] == expected


@pytest.mark.parametrize("kind", findings.TABLE, ids=lambda kind: kind.id)
def test_an_entry_says_what_to_do_or_why_it_is_not_seen(kind):
    assert kind.severity in findings.SEVERITIES
    assert kind.fix.endswith(".") or kind.fix.endswith(")")
    assert bool(kind.unseen) != kind.detectable


# ---- the command -----------------------------------------------------------------------------------------------------


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(["doctor", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_has_the_agreed_shape(bundle, capsys):
    bundle.take("hosts", "hosts/bad_127_0_1_1.txt")
    code, out, _ = run(capsys, "--bundle", str(bundle.folder), "--json")
    document = json.loads(out)
    assert code == 1
    assert document["schema"] == 1
    assert {tuple(one) for one in document["findings"]} == {("id", "severity", "message", "fix", "evidence")}
    one = document["findings"][0]
    assert (one["id"], one["severity"], one["evidence"]) == ("F24", "stop", "hosts: 127.0.1.1 spark-a")


def test_a_healthy_node_ends_with_0(bundle, capsys):
    assert run(capsys, "--bundle", str(bundle.folder))[0] == 0


def test_findings_of_a_pair_name_the_node(pair, capsys):
    pair[1].take("hosts", "hosts/bad_127_0_1_1.txt")
    code, out, _ = run(capsys, "--bundle", str(pair[0].folder.parent))
    assert code == 1
    assert out.startswith("stop F24  spark-b: /etc/hosts gives spark-a")


def test_the_lone_twin_and_what_the_other_lacks_are_named(bundle, capsys):
    link(TWINS[1])(bundle)
    _, out, _ = run(capsys, "--bundle", str(bundle.folder))
    assert f"Only {TWINS[0]} of the two functions of its port is used: {TWINS[1]} has no link." in out


def empty(folder: Path) -> None:
    folder.mkdir()


def strangers(folder: Path) -> None:
    folder.mkdir()
    (folder / "readme.txt").write_text("hello")


def one_bad(folder: Path) -> None:
    folder.mkdir()
    (folder / "ip-addr.json").write_text("[{")


def one_noisy(folder: Path) -> None:
    folder.mkdir()
    (folder / "ibdev2netdev.txt").write_bytes(bytes(range(256)))


def a_file(folder: Path) -> None:
    folder.write_text("")


@pytest.mark.parametrize("make", [empty, strangers, one_bad, one_noisy, a_file, lambda folder: None])
def test_what_is_no_bundle_ends_with_2_and_one_sentence(tmp_path, capsys, make):
    make(tmp_path / "bundle")
    code, out, err = run(capsys, "--bundle", str(tmp_path / "bundle"), "--json")
    assert code == 2
    assert json.loads(out)["ok"] is False
    assert err.count("\n") == 1


def test_a_damaged_file_is_named_and_the_rest_is_judged(bundle, capsys):
    bundle.put("ip-addr.json", "[{").take("hosts", "hosts/bad_127_0_1_1.txt")
    code, _, err = run(capsys, "--bundle", str(bundle.folder))
    assert code == 1
    assert "ip-addr.json is not what `ip -j addr` prints; it was left out" in err


def test_one_nodes_bundle_is_better_than_none(pair, capsys):
    pair[1].only("meminfo").put("meminfo", bytes(range(256)))
    code, _, err = run(capsys, "--bundle", str(pair[0].folder.parent))
    assert code == 0
    assert "no file of spark-b can be read as what its name says" in err


@pytest.mark.parametrize(
    "text",
    [
        '[{"dst": "192.168.100.11", "dev": "enp1s0f0np0", "state": 5}]',
        '[{"dst": ["x"], "dev": {}, "state": [[], {}]}]',
        '[{"ifname": "enp1s0f0np0", "flags": [[], {}], "mtu": true, "addr_info": {"a": 1}, "master": {}}]',
        '[{"ifname": "enp1s0f0np0", "addr_info": [{"family": "inet", "local": {}, "prefixlen": [1]}]}]',
        "9" * 5000,
        "[" * 100000,
    ],
)
@pytest.mark.parametrize("name", ["ip-addr.json", "ip-neigh.json", "ip-route.json"])
def test_json_of_any_shape_is_never_an_internal_error(bundle, capsys, name, text):
    bundle.put(name, text)
    assert run(capsys, "--bundle", str(bundle.folder), "--json")[0] in (0, 1)


def test_numbers_that_are_none_are_never_an_internal_error(bundle, capsys):
    bundle.put("meminfo", f"MemTotal: {'9' * 5000} kB\nMemFree: 1.2.3 kB\n")
    bundle.put("ib_write_bw.txt", f" {'9' * 5000} 1 0.00 1.2.3 1\n 65536 1 1.2.3 4.5.6\n")
    bundle.put(
        "nccl-tests.txt",
        f" 17179869184 1 float none -1 1.2 1.2 1.2.3 0\n# Avg bus bandwidth : 1.2.3\nmaxBytes {'9' * 5000}\n",
    )
    bundle.put("engine.log", f"Prefix cache hit rate: 1.2.3% Running:\nNCCL_IB_GID_INDEX={'9' * 5000}\n")
    bundle.put("nvidia-smi-table.txt", f"| N/A {'9' * 5000}W / N/A | x | {'9' * 5000}% Default |\n")
    assert run(capsys, "--bundle", str(bundle.folder), "--json")[0] in (0, 1)


def test_without_pyyaml_the_rest_is_judged(bundle, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    bundle.take("hosts", "hosts/bad_127_0_1_1.txt")
    code, out, err = run(capsys, "--bundle", str(bundle.folder))
    assert (code, "F24" in out) == (1, True)
    assert err.count("netplan/ cannot be read without PyYAML") == 1


def test_a_pipe_under_the_name_of_a_file_does_not_hang(bundle):
    bundle.drop("meminfo")
    os.mkfifo(bundle.folder / "meminfo")
    assert bundle.found() == set()


@pytest.fixture
def closed():
    """`closed(bundle, name)`: a copy of the parent folder, all but `name` readable; then no longer root."""
    root, user = Path(tempfile.mkdtemp()), os.geteuid()

    def close(bundle, name):
        folder = root / "nodes"
        shutil.copytree(bundle.folder.parent, folder)
        # What is imported late may lie where only root reads.
        for command in ("doctor", "fabric"):
            cli.main([command, "--bundle", str(bundle.folder)])
        for path in (root, folder):
            path.chmod(0o755)
        (folder / name).chmod(0)
        if user == 0:
            os.seteuid(65534)
        return folder

    yield close
    os.seteuid(user)
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(root)


@pytest.mark.parametrize(
    "name",
    [
        *("meminfo", "ip-addr.json", "netplan", "sys", "sys/class", "sys/class/infiniband"),
        "sys/class/infiniband/rocep1s0f0/device",
        "sys/class/infiniband/rocep1s0f0/ports/1",
    ],
)
def test_what_cannot_be_read_is_left_out(bundle, closed, capsys, name):
    folder = closed(bundle, f"spark-a/{name}")
    code, out, err = run(capsys, "--bundle", str(folder / "spark-a"), "--json")
    assert (code, "stop" in out) == (0, False)
    assert "rocep1s0f0/" in name or f"{name} cannot be read" in err
    assert cli.main(["fabric", "--bundle", str(folder / "spark-a"), "--json"]) in (0, 2)


def test_a_node_that_cannot_be_read_is_named_and_the_other_is_judged(pair, closed, capsys):
    code, _, err = run(capsys, "--bundle", str(closed(pair[0], "spark-b")))
    assert code == 0
    assert "the folder spark-b cannot be read" in err


@pytest.mark.parametrize("name", [".", "spark-a"])
def test_a_bundle_that_cannot_be_read_ends_with_2(bundle, closed, capsys, name):
    code, _, err = run(capsys, "--bundle", str(closed(bundle, name)))
    assert code == 2
    assert "cannot be read: run as its owner" in err


def test_a_path_that_is_too_long_ends_with_2(capsys):
    assert run(capsys, "--bundle", "/" + "x" * 5000)[0] == 2


def test_secrets_do_not_show_in_evidence(bundle, capsys):
    append(
        "engine.log",
        "error: unrecognized arguments: --api-key 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    )(bundle)
    _, out, _ = run(capsys, "--bundle", str(bundle.folder), "--json")
    assert "F40" in out
    assert "9f86d081" not in out


@pytest.mark.parametrize("seed", range(25))
def test_noise_is_never_an_internal_error(tmp_path, capsys, seed):
    """Cut, shuffle and overwrite files of a healthy bundle at random."""
    chance = random.Random(seed)
    bundle = healthy(tmp_path / "spark-a")
    for path in [path for path in bundle.folder.rglob("*") if path.is_file()]:
        if chance.random() < 0.3:
            data = bytearray(path.read_bytes())
            kinds = (range(256), b'0123456789.:,-"{}[]\n ', b"null", b"9")
            for _ in range(chance.randrange(1, 40)):
                if data:
                    data[chance.randrange(len(data))] = chance.choice(chance.choice(kinds))
            path.write_bytes(bytes(data[: chance.randrange(len(data) + 1)]))
    assert run(capsys, "--bundle", str(bundle.folder), "--json")[0] in (0, 1)


def test_huge_logs_take_seconds(bundle):
    """400,000 lines in each of three logs, the fault in the last one; a third of them hold some needle."""
    lines = [
        "NCCL INFO Channel 00/04 : 0 1 NET/IB enough said about it, and a few words more to make the line long",
        "INFO 11-30 21:00:00 [loggers.py:123] Engine 000: Avg prompt throughput: 0.0, Prefix cache hit rate: 0.0%",
        "kernel: audit: type=1400 apparmor=ALLOWED DPT=443 PROTO=TCP SRC=192.0.2.1 NVRM: Xid nothing",
    ]
    text = "\n".join(lines[number % 3] for number in range(400_000)) + "\n"
    for name in ("engine.log", "nccl.log", "journal.txt"):
        bundle.put(name, text)
    append("journal.txt", "NVRM: Xid (PCI:000f:01:00): 31, pid=1")(bundle)
    begun = time.process_time()
    assert bundle.found() == {"R8 stop"}
    assert time.process_time() - begun < 10


def test_huge_lines_and_results_take_seconds(bundle):
    row = " 17179869184 2147483648 float none -1 372345 46.14 22.1 0 372111 46.17 22.1 0\n"
    bundle.put("nccl-tests.txt", "#  Rank  0\n#  Rank  1\n" + row * 200_000)
    bundle.put("journal.txt", "nvcc" * 100_000 + "\n" + ("AER" * 3000 + "\n") * 20)
    bundle.put("nvidia-smi-table.txt", ("|" + " C " * 3000 + "\n") * 100)
    begun = time.process_time()
    assert bundle.found() == set()
    assert time.process_time() - begun < 10


def test_a_healthy_bundle_takes_no_time(bundle):
    """Processor time of the whole process: the machine may be busy."""
    script = (
        "import resource, sys; from glm_vllm_overlay.cli import main; main(sys.argv[1:]);"
        "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime)"
    )
    command = [sys.executable, "-c", script, "fabric", "--bundle", str(bundle.folder), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(SOURCES)})
    assert float(result.stdout.splitlines()[-1]) < 0.2
