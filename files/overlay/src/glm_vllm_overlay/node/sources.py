"""Choosing where a model comes from: the first source that can be used, with the list of its files.

A source is {"repo", "url" or "path", "revision", "licence", "name"}. One that is gone, short or contradicts what is
known of it is passed over, with the reason.
"""

from __future__ import annotations

import glob
import time
from pathlib import Path
from typing import Any

from glm_vllm_overlay.node import carrier
from glm_vllm_overlay.node.carrier import Trouble
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import read_json_if_there, sha256
from glm_vllm_overlay.node.model import (
    FLAG,
    MANIFEST,
    Wanted,
    checked_files,
    folder_revision,
    in_index,
    list_folder,
)

TRIES = 6  # without a byte of progress between them
INDEX = "model.safetensors.index.json"


def complete_here(folder: Path) -> Wanted | None:
    """Files of a verified model that is here, or None."""
    flag, text = read_json_if_there(folder / FLAG), folder / MANIFEST
    if not flag or flag.get("manifest_sha256") != sha256(text):
        return None
    return checked_files(read_json_if_there(text).get("files"), str(text))


def from_cache(source: dict[str, Any], caches: list[str]) -> Wanted | None:
    """Files of a repository at its revision as a client's cache holds it: its links name the hashes."""
    for cache in (path for pattern in caches for path in sorted(glob.glob(pattern))):
        top = Path(cache, "models--" + source["repo"].replace("/", "--"), "snapshots", source["revision"])
        if top.is_dir() and (found := list_folder(top)):
            files = {}
            for name, stat in found.items():
                digest = (top / name).resolve().name
                files[name] = {"size": stat.st_size, "sha256": digest if len(digest) == 64 else None}
                files[name]["blob"] = digest if len(digest) == 40 else None
            try:
                wanted = checked_files(files, str(top))
                in_index(top / INDEX, wanted, str(top))
                return wanted
            except Unusable:
                continue
    return None


def from_folder(source: dict[str, Any]) -> Wanted:
    """Files of a folder: of its manifest where it has one, else as they lie there. Completes the revision."""
    top = Path(source["path"])
    if not top.is_dir():
        raise Unusable(f"{top} is not a folder on this node")
    manifest, found = read_json_if_there(top / MANIFEST), list_folder(top)
    files = manifest.get("files") or {name: {"size": stat.st_size} for name, stat in found.items()}
    source["revision"] = source["revision"] or manifest.get("revision") or folder_revision(found)
    wanted = checked_files(files, str(top))
    for name, want in wanted.items():
        if name not in found or found[name].st_size != want["size"]:
            raise Unusable(f"{top} holds no whole {name}, which its manifest.json names")
    in_index(top / INDEX, wanted, str(top))
    return wanted


def usable(source: dict[str, Any], job: dict[str, Any]) -> tuple[Wanted, list[dict[str, Any]]]:
    """Files of a source and the origins of `fetch` for them; raises Unusable with one sentence."""
    origin = {key: source[key] for key in ("repo", "url", "path") if source.get(key)}
    if source.get("path"):
        wanted, origins = from_folder(source), [origin]
    else:
        origins = [] if job.get("offline") else [origin | {"revision": source["revision"]}]
        wanted = (
            complete_here(Path(job["dir"], source["name"], source["revision"]))
            or (from_cache(source, job.get("caches", [])) if source.get("repo") else None)
            or (ours(source, job) if job.get("offline") else None)
            or listed(source, job, origins)
        )
    if trusted := ours(source, job):
        enforce(wanted, trusted, source)
    return wanted, origins


def ours(source: dict[str, Any], job: dict[str, Any]) -> Wanted | None:
    """What files/manifests says of a source, or None."""
    manifest = job.get("manifests", {}).get(f"{source['name']}/{source['revision']}")
    return checked_files(manifest["files"], f"files/manifests/{source['name']}") if manifest else None


def listed(source: dict[str, Any], job: dict[str, Any], origins: list[dict[str, Any]]) -> Wanted:
    """What a source that has to be asked says it holds."""
    label = carrier.label(source)
    if not origins:
        raise Unusable(f"{label} is not complete here, and model_fetch_offline is true")
    asked = carrier.make(carrier.through(origins[0], job))
    fruitless = 0
    try:
        while True:
            try:
                return checked_files(asked.listing(), label)
            except Trouble as error:
                fruitless += 1
                if not error.passing or fruitless == TRIES:
                    raise Unusable(f"{label} cannot be listed: {error}") from None
                time.sleep(min(300.0, error.wait or float(job.get("backoff", 1)) * 2**fruitless))
    finally:
        asked.stop()


def enforce(wanted: Wanted, trusted: Wanted, source: dict[str, Any]) -> None:
    """Have the hashes of files/manifests hold; raises Unusable when the source says something else."""
    if set(wanted) != set(trusted):
        odd = sorted(set(wanted) ^ set(trusted))[0]
        raise Unusable(f"{carrier.label(source)} and files/manifests do not name the same files, such as {odd}")
    for name, want in wanted.items():
        if want["size"] != trusted[name]["size"] or want["sha256"] not in (None, trusted[name]["sha256"]):
            raise Unusable(f"{carrier.label(source)} has another {name} than files/manifests says")
        want["sha256"] = trusted[name]["sha256"]


def choose(job: dict[str, Any]) -> dict[str, Any]:
    """The first usable source. Raises Refusal with all reasons when there is none."""
    reasons: list[str] = []
    for given in job["sources"]:
        name = given.get("name") or Path(given.get("repo") or given.get("path") or given["url"].rstrip("/")).name
        source = {"revision": None} | given | {"name": name}
        try:
            wanted, origins = usable(source, job)
        except Unusable as error:
            reasons.append(str(error))
            continue
        folder = Path(job["dir"], source["name"], source["revision"])
        return {
            "source": source,
            "path": str(folder),
            "files": wanted,
            "origins": origins,
            "passed_over": reasons,
        }
    raise Refusal(f"no source of the model can be used: {'; '.join(reasons)}")
