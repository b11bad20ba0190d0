"""Whether a release still has what was compiled for it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_vllm_overlay.node.errors import Refusal
from glm_vllm_overlay.node.files import read_json, read_json_if_there, sha256
from glm_vllm_overlay.node.paths import Paths

# What `glm-vllm build --modules` leaves beside FlashInfer's libraries, last of all.
MODULES = "modules.json"
# What `glm-vllm build --rehearsal` leaves in the folder of the engine's caches, last of all.
REHEARSAL = "rehearsal.json"
# Where FlashInfer keeps its own, by release; and where the others keep theirs, by release and shape of engine.
FLASHINFER = "FLASHINFER_WORKSPACE_BASE"
SHAPED = (
    "VLLM_CACHE_ROOT",
    "TRITON_CACHE_DIR",
    "DG_JIT_CACHE_DIR",
    "TILELANG_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "XDG_CACHE_HOME",
)
CACHES = (*SHAPED, FLASHINFER)


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


def toolkit_version(nvcc: Path) -> str:
    """A toolkit's full version, such as 13.0.88; "" when there is no nvcc or it does not say."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    match = re.search(r"\bV(\d+\.\d+[.\d]*)", text)
    return match[1] if match else ""


def another_toolkit(listed: Mapping[str, Any], nvcc: Path) -> str:
    """Why `nvcc` is not of the toolkit that a list names, in a few words; "" when it is."""
    then, now = listed.get("toolkit"), toolkit_version(nvcc)
    if then and then == now:
        return ""
    return f"compiled with CUDA {then or 'of an unknown version'}, and {nvcc} is {now or 'not there'}"


def check_modules(paths: Paths, release: str) -> None:
    """Refusal unless what FlashInfer has to compile is compiled: with the weights in memory there is no room for that.

    `modules` of the release's manifest is FlashInfer's folder, null without a GPU.
    """
    manifest = read_json(paths.release_manifest(release))
    if (folder := manifest.get("modules")) is None:
        return
    listed = _below(paths, folder) / MODULES
    if problem := modules_problem(listed, _nvcc(paths, manifest)):
        raise Refusal(
            f"FlashInfer's modules are not all in {listed.parent} ({problem}), so the engine would "
            "compile with the weights in memory: run playbooks/release.yml"
        )


def _below(paths: Paths, absolute: str) -> Path:
    return paths.root / absolute.lstrip("/")


def _nvcc(paths: Paths, manifest: Mapping[str, Any]) -> Path:
    """The release's compiler. From a file of root's: the gate runs it, and the engine may write the lists."""
    return _below(paths, manifest.get("cuda_home") or "/usr/local/cuda") / "bin/nvcc"


def modules_problem(listed: Path, nvcc: Path) -> str:
    """Why FlashInfer would compile whatever `listed` (modules.json) says, in a few words; "" when it would not."""
    document = read_json_if_there(listed)
    files = document.get("files")
    missing = [name for name, file in files.items() if not (listed.parent / file).is_file()] if files else [MODULES]
    return f"without {', '.join(missing)}" if missing else another_toolkit(document, nvcc)


def check_rehearsal(paths: Paths, deployment: Mapping[str, Any]) -> None:
    """Refusal unless what the engine compiles by itself is there, from a rehearsal of this release and this shape.

    `caches` of deployment.json is the folder of the engine's caches, null without a GPU.
    """
    if (folder := deployment.get("caches")) is None:
        return
    folder = _below(paths, folder)
    if problem := rehearsal_problem(folder, _nvcc(paths, read_json(paths.release_manifest(deployment["release"])))):
        raise Refusal(
            f"the engine would compile with the weights in memory, since {folder} {problem}: "
            "run playbooks/serve.yml, which rehearses the start"
        )


def rehearsal_problem(folder: Path, nvcc: Path) -> str:
    """What a folder of caches lacks, to be read after its name; "" when its list is whole and of this toolkit."""
    document = read_json_if_there(folder / REHEARSAL)
    files = document.get("files")
    if not files:
        return f"has no {REHEARSAL}"
    if document.get("key") != folder.name:
        return f"has the list of another engine ({document.get('key')})"
    missing = [name for name, size in files.items() if _size(folder / name) != size]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"lacks {missing[0]}{more}"
    problem = another_toolkit(document, nvcc)
    return f"was {problem}" if problem else ""


def _size(file: Path) -> int | None:
    """Bytes of a file; None when it is not there."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def machine_code(environment: Mapping[str, str]) -> dict[Path, int]:
    """Every library and cubin below the caches that the engine's environment names, with its time of change in ns."""
    found = {}
    for folder in {environment[name] for name in CACHES if environment.get(name)}:
        for place, _, names in os.walk(folder):  # which passes over folders that go away meanwhile, unlike Path.rglob
            for file in (Path(place, name) for name in names if name.endswith((".so", ".cubin"))):
                with contextlib.suppress(FileNotFoundError):  # compilers rename their drafts
                    found[file] = file.stat().st_mtime_ns
    return found


def compiled_since(before: Mapping[Path, int], environment: Mapping[str, str], rehearsed: bool = False) -> str:
    """What was compiled since `before`, as one sentence: a start that finds everything ready compiles nothing.

    rehearsed: whether this start's gate had found a whole list, so that there should have been nothing.
    """
    new = sorted(str(file) for file, when in machine_code(environment).items() if before.get(file) != when)
    if not new:
        return "compiled nothing at this start"
    named = ", ".join(new[:3]) + (" …" if len(new) > 3 else "")
    told = f"compiled {len(new)} modules at this start, which the next one will find: {named}"
    return f"WARNING: {told} (the rehearsal had not met them: please report it)" if rehearsed else told
