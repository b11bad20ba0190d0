"""Whether a release still has the kernels that it was built with."""

from __future__ import annotations

from glm_vllm_overlay.node.errors import Refusal
from glm_vllm_overlay.node.files import read_json, sha256
from glm_vllm_overlay.node.paths import Paths


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
