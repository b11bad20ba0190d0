"""Whether a release still has what was compiled for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from glm_vllm_overlay.node.errors import Refusal
from glm_vllm_overlay.node.files import read_json, read_json_if_there, sha256
from glm_vllm_overlay.node.paths import Paths

# What `glm-vllm build --modules` leaves beside FlashInfer's libraries, last of all.
MODULES = "modules.json"
# Where the engine's libraries keep what they compile at run time.
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR", "TILELANG_CACHE_DIR")


def check_kernels(paths: Paths, release: str) -> None:
    """Refusal unless each file of the release's kernels has the SHA-256 that stands in its manifest.json.

    There `kernels: null` is a release for machines without a GPU.
    """
    manifest = paths.release_manifest(release)
    mend = f"stop both engines, remove {manifest.parent} and run playbooks/release.yml"
    kernels = read_json(manifest).get("kernels", {})
    if kernels is None:
        return
    if not kernels.get("files"):
        raise Refusal(f"{manifest} names no kernels: {mend}")
    for name, digest in kernels["files"].items():
        file = paths.venv(release) / "lib/glm-vllm" / name
        found = sha256(file)
        if found != digest:
            what = "cannot be read" if found is None else "is not the file that the release's manifest names"
            raise Refusal(f"{file} {what}: {mend}")


def check_modules(paths: Paths, release: str) -> None:
    """Refusal unless what FlashInfer has to compile is compiled: with the weights in memory there is no room for that.

    `modules` of the release's manifest is FlashInfer's folder, null without a GPU.
    """
    folder = read_json(paths.release_manifest(release)).get("modules")
    if folder is None:
        return
    listed = paths.root / folder.lstrip("/") / MODULES
    files = read_json_if_there(listed).get("files")
    missing = [name for name, file in files.items() if not (listed.parent / file).is_file()] if files else [MODULES]
    if missing:
        raise Refusal(
            f"FlashInfer's modules are not all in {listed.parent} (without {', '.join(missing)}), so the engine would "
            f"compile with the weights in memory: remove {listed} if it is there and run playbooks/release.yml"
        )


def machine_code(environment: Mapping[str, str]) -> dict[Path, int]:
    """Every library and cubin below the caches that the engine's environment names, with its time of change in ns."""
    found = {}
    for folder in {environment[name] for name in CACHES if environment.get(name)}:
        for place, _, names in os.walk(folder):  # which passes over folders that go away meanwhile, unlike Path.rglob
            for file in (Path(place, name) for name in names if name.endswith((".so", ".cubin"))):
                with contextlib.suppress(FileNotFoundError):  # compilers rename their drafts
                    found[file] = file.stat().st_mtime_ns
    return found


def compiled_since(before: Mapping[Path, int], environment: Mapping[str, str]) -> str:
    """What was compiled since `before`, as one sentence: a start that finds everything ready compiles nothing."""
    new = sorted(str(file) for file, when in machine_code(environment).items() if before.get(file) != when)
    if not new:
        return "compiled nothing at this start"
    named = ", ".join(new[:3]) + (" …" if len(new) > 3 else "")
    return f"compiled {len(new)} modules at this start, which the next one will find: {named}"
