# SPDX-License-Identifier: Apache-2.0
"""A bundle: one folder from which `site.yml` sets up a pair without a network. Plain functions: no Ansible, no network.

bundle.json  {"schema": 1, "profile", "locks": {name: SHA-256}, "weights": {"name", "revision", "licence"} or null}
SHA256SUMS   every other file, as `sha256sum -c` reads it
wheels/      what the locks name
apt/         packages with all they depend on, and their index
project/     this project without an inventory, which may hold keys
licences/    ours, and a list of what the wheels say of themselves
weights/     <name>/<revision>/, when asked for; never the drafter
"""

from __future__ import annotations

import email
import hashlib
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SUMS, DOCUMENT = "SHA256SUMS", "bundle.json"
# What site.yml runs from. An inventory is its owner's, and stays where it is.
PROJECT = (
    "ansible.cfg", "site.yml", "playbooks", "roles", "plugins", "files", "twin/engine", "tests/gpu", "docs",
    "CHANGELOG.md", "LICENSE", "NOTICE", "README.md",
)  # fmt: skip
MADE = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc", "build", ".*")
TARGET = "glm5_next"  # model_type of what may be handed on; the drafter's is another


class Spoilt(Exception):
    """A bundle, or what goes into one, that cannot be used; the message is one sentence."""


def digest(file: Path) -> str:
    """SHA-256 of a file as hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digests(top: Path, names: list[str]) -> dict[str, str]:
    """SHA-256 by name, a file a core at once."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(names, pool.map(lambda name: digest(top / name), names), strict=True))


def listing(top: Path) -> list[str]:
    """Names of all files below `top` but the sums and what Python leaves beside its sources, sorted."""
    found = (
        path.relative_to(top).as_posix()
        for path in top.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    )
    return sorted(name for name in found if name != SUMS)


def write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)


def seal(top: Path) -> None:
    """Write the sums of what is there."""
    found = digests(top, listing(top))
    write(top / SUMS, "".join(f"{value}  {name}\n" for name, value in found.items()))


def sums(top: Path) -> dict[str, str]:
    """SHA-256 by name as the bundle says; raises Spoilt."""
    try:
        lines = (top / SUMS).read_text(encoding="utf-8").splitlines()
        return {name: value for value, name in (line.split("  ", 1) for line in lines)}
    except (OSError, ValueError):
        raise Spoilt(
            f"{top} is no whole bundle, for it has no readable {SUMS}: make it anew with playbooks/bundle.yml."
        ) from None


def check(top: Path, profile: str, locks: Mapping[str, Path]) -> dict[str, Any]:
    """bundle.json of a bundle that is whole and made for this profile and these locks; raises Spoilt.

    Weights are looked for by name alone: each of their bytes is proved when it reaches the node.
    """
    said, there = sums(top), set(listing(top))
    again = "copy the bundle again, or make it anew with playbooks/bundle.yml"
    for name in sorted(said):
        if name not in there:
            raise Spoilt(f"{top / name} is missing: {again}.")
    if more := sorted(there - set(said)):
        raise Spoilt(f"{top / more[0]} is no part of the bundle ({SUMS} does not name it): take it away.")
    read = [name for name in sorted(said) if not name.startswith("weights/")]
    for name, value in digests(top, read).items():
        if value != said[name]:
            raise Spoilt(f"{top / name} is not what {SUMS} says: {again}.")
    document = json.loads((top / DOCUMENT).read_text(encoding="utf-8"))
    made = document["profile"]
    if made != profile:
        raise Spoilt(f"{top} was made for the profile {made}, and this inventory is of {profile}: make one for it.")
    for name, lock in locks.items():
        if document["locks"].get(name) != digest(lock):
            raise Spoilt(
                f"{top} was made for another files/locks/{name} than this project's: run site.yml from {top}/project, "
                "or make the bundle anew."
            )
    return document


def licences_of(wheels: Path) -> str:
    """A line a wheel: name, version, and the licence that its metadata names; its texts are in the wheel."""
    lines = []
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA") and n.count("/") == 1)
            said = email.message_from_bytes(archive.read(name))
        classified = [c.rpartition(" :: ")[2] for c in said.get_all("Classifier", []) if c.startswith("License ::")]
        free = (said["License"] or "").strip().splitlines()
        licence = said["License-Expression"] or ", ".join(classified) or (free[0] if free else "not named")
        lines.append(f"{said['Name']} {said['Version']}: {licence}\n")
    return "".join(lines)


def put(source: Path, target: Path) -> None:
    """Make `target` a copy of a file or folder of ours."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=MADE)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def own_parts(top: Path, project: Path) -> None:
    """Write project/ and licences/ anew."""
    for name in ("project", "licences"):
        shutil.rmtree(top / name, ignore_errors=True)
    for name in PROJECT:
        put(project / name, top / "project" / name)
    (top / "licences").mkdir()
    for name in ("LICENSE", "NOTICE"):
        put(project / name, top / "licences" / name)
    write(top / "licences/WHEELS.txt", licences_of(top / "wheels"))


def weights_of(folder: Path) -> dict[str, Any]:
    """manifest.json of a model folder that may go into a bundle; raises Spoilt."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        {key: manifest[key] for key in ("name", "revision", "files")}
    except (OSError, ValueError, KeyError):
        raise Spoilt(
            f"bundle_weights names {folder}, which has no readable manifest.json and config.json: make the first with "
            "`glm-vllm manifest`."
        ) from None
    if kind != TARGET:
        raise Spoilt(
            f"bundle_weights names {folder}, whose model_type is {kind} and not {TARGET}: a drafter is never handed on."
        )
    return manifest


def bring_weights(top: Path, folder: Path, manifest: Mapping[str, Any]) -> None:
    """Copy a model into the bundle, each file proved; what is right there stays. Raises Spoilt."""
    target = top / "weights" / manifest["name"] / manifest["revision"]
    keep_only(top / "weights", target)
    for name, want in {**manifest["files"], "manifest.json": {}}.items():
        copy = target / name
        if copy.exists() and want.get("sha256") == digest(copy):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, copy)
        if want and digest(copy) != want["sha256"]:
            copy.unlink()
            raise Spoilt(
                f"{folder / name} is not what its manifest.json says: repair it with `glm-vllm verify --full` and a "
                "fetch."
            )


def keep_only(top: Path, wanted: Path | None) -> None:
    """Take other models out of `top`."""
    for folder in top.glob("*/*"):
        if folder != wanted:
            shutil.rmtree(folder)
