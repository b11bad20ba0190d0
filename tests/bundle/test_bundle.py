"""The twin from a bundle alone: two bare machines without a mirror, an index or a way out; and a spoilt bundle."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import bed
import pair
import pytest

pytestmark = [pytest.mark.full, pytest.mark.timeout(5400)]

# What the bed offers its nodes otherwise
OFFERED = ("/srv/repo", "/srv/wheels", "/srv/models", "/etc/pip.conf", "/etc/uv/uv.toml")
ALONE = """set -e
umount /srv/repo /srv/wheels /srv/models
rm -rf /etc/pip.conf /etc/uv /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
echo 'deb http://192.0.2.1/debian bookworm main' > /etc/apt/sources.list
"""


def made(top: Path, weights: Path, *arguments: str) -> pair.Run:
    """playbooks/bundle.yml for the twin."""
    return pair.run_playbook(
        "playbooks/bundle.yml",
        *arguments,
        bundle_dir=str(top / "bundle"),
        bundle_find_links=[str(bed.CACHE / "wheels")],
        bundle_weights=str(weights),
        bundle_weights_licence="none",
    )


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its manifest beside it."""
    folder = tmp_path_factory.mktemp("weights") / "tiny"
    shutil.copytree(bed.checkpoint("chain"), folder)
    command = [
        sys.executable,
        "-m",
        "glm_vllm_overlay",
        "manifest",
        str(folder),
        "--output",
        str(folder / "manifest.json"),
    ]
    subprocess.run(command, check=True, cwd=bed.ROOT / "files/overlay/src", stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    top = tmp_path_factory.mktemp("made")
    run = made(top, weights)
    assert run.status == 0, run.failures()
    return top / "bundle"


@pytest.fixture(scope="session")
def alone(bundle: Path) -> Iterator[None]:
    """Both machines, with the disk that holds the bundle's weights in the head."""
    bed.twin("clean")
    bed.twin("up")
    try:
        for node in pair.NODES:
            bed.on(node, "sh", "-c", ALONE)
        archive = subprocess.Popen(
            ["tar", "--create", "--absolute-names", str(bundle / "weights")], stdout=subprocess.PIPE
        )
        command = [bed.ROOT / "twin/twin.sh", "sh", bed.HEAD, "tar", "--extract", "--absolute-names"]
        subprocess.run(command, stdin=archive.stdout, check=True, timeout=120)
        assert archive.wait() == 0
        yield
    finally:
        bed.twin("clean")


def site(bundle: Path, *arguments: str) -> pair.Run:
    """site.yml from the bundle's own copy of the project; the inventory's sources of weights are out of reach."""
    hub = {
        "repo": "example/absent",
        "revision": json.loads((bundle / "bundle.json").read_text())["weights"]["revision"],
    }
    return pair.run_playbook(
        "site.yml",
        *arguments,
        project=bundle / "project",
        timeout=2400,
        glm_bundle=str(bundle),
        model_fetch_sources=[hub | {"licence": "none"}],
    )


def test_made_again_nothing_changes(bundle: Path, weights: Path) -> None:
    again = made(bundle.parent, weights)
    assert again.status == 0
    assert again.changed() == {}


def test_it_holds_no_key_and_no_drafter(bundle: Path) -> None:
    names = [path.relative_to(bundle).as_posix() for path in bundle.rglob("*")]
    assert not [name for name in names if "inventory/" in name or "vault" in name or "dflash" in name.lower()]
    assert {"licences/LICENSE", "licences/NOTICE", "licences/WHEELS.txt", "apt/Packages"} <= set(names)


def test_the_machines_have_nothing_else(alone: None) -> None:
    for node in pair.NODES:
        assert bed.on(
            node, "sh", "-c", f"cat {' '.join(OFFERED)} 2>/dev/null | wc -c; ls /srv/* | grep -c whl || true"
        ).split() == ["0", "0"]
        assert "unreachable" in bed.on(node, "sh", "-c", "ip route get 192.0.2.1 2>&1 || true")


def test_a_spoilt_file_is_named_before_a_host_is_reached(alone: None, bundle: Path) -> None:
    wheel = next((bundle / "wheels").glob(f"{pair.WHEEL}-*.whl"))
    whole = wheel.read_bytes()
    try:
        wheel.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        run = site(bundle)
    finally:
        wheel.write_bytes(whole)
    assert run.status != 0
    assert set(run.stats["processed"]) == {"localhost"}
    (said,) = run.failures()["localhost"]
    assert (
        said
        == f"{wheel} is not what SHA256SUMS says: copy the bundle again, or make it anew with playbooks/bundle.yml."
    )


def test_it_is_foretold(alone: None, bundle: Path) -> None:
    run = site(bundle, "--check", "--diff")
    assert run.status == 0, run.failures()


def test_a_pair_from_it_alone(alone: None, bundle: Path) -> None:
    run = site(bundle)
    assert run.status == 0, f"{run.failures()}\n{run.output[-3000:]}"
    assert pair.answer() == pair.ANSWER
    for node in pair.NODES:
        assert "ok installed" in bed.on(node, "dpkg", "--status", "nftables")
        assert bed.on(node, "cat", "/etc/apt/sources.list").startswith("deb http://192.0.2.1/"), (
            "the machine's own is changed"
        )
    again = site(bundle)
    assert again.status == 0, again.failures()
    assert again.changed() == {}
