"""`glm-vllm-twin-checkpoint KIND OUT_DIR`: build one tiny checkpoint with its manifest, unless it is there already.

KIND  random     weights drawn at random, with a faint chain: for numerics, its text means nothing
      chain      every chat is answered by one fixed sentence, and the MTP layer always drafts it right
      sometimes  the same text, and the MTP layer is right about some tokens only
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

KINDS = ("random", "chain", "sometimes")
# Part of every revision: raise it when a change alters any byte that a kind writes.
RECIPE = 3


def name(kind: str) -> str:
    """Model name of a kind, as the deployment records it."""
    return f"tiny-glm-5.3-flash-{kind}"


def revision(kind: str) -> str:
    """Revision of a kind, 40 hex digits: the SHA-1 of its name and the recipe's number."""
    return hashlib.sha1(f"{name(kind)} recipe {RECIPE}".encode()).hexdigest()


def _manifest(kind: str, folder: Path) -> dict[str, object]:
    files = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
    }
    return {"schema": 1, "name": name(kind), "revision": revision(kind), "files": files}


def found(out: Path) -> tuple[str, str] | None:
    """Name and revision of the checkpoint in a folder; None when there is none."""
    try:
        manifest = json.loads((out / "manifest.json").read_text())
        return manifest["name"], manifest["revision"]
    except (OSError, ValueError, KeyError):
        return None


def build(kind: str, out: Path) -> None:
    """Write the checkpoint of one kind and its `manifest.json` into `out`, in place of what is there."""
    from glm_vllm_twin.checkpoint import weights

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        weights.write(kind, folder)
        manifest = json.dumps(_manifest(kind, folder), indent=1, sort_keys=True) + "\n"
        (folder / "manifest.json").write_text(manifest)
        folder.chmod(0o755)
        for path in folder.iterdir():
            path.chmod(0o644)
        if out.exists():
            shutil.rmtree(out)
        shutil.move(folder, out)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit 0 when the folder is complete, 2 on bad usage."""
    parser = argparse.ArgumentParser(prog="glm-vllm-twin-checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=" | ".join(KINDS))
    parser.add_argument(
        "out", type=Path, metavar="OUT_DIR", help="folder to create; one of an older recipe is replaced"
    )
    options = parser.parse_args(arguments)
    kind, out = options.kind, options.out
    there = found(out)
    if out.exists() and there is None and (not out.is_dir() or any(out.iterdir())):
        parser.error(f"{out} exists and is not an empty folder: name another one or empty it.")
    if there is not None and there[0] != name(kind):
        parser.error(f"{out} holds {there[0]}: name another folder for {name(kind)}.")
    if there != (name(kind), revision(kind)):
        build(kind, out)
    print(f"{name(kind)}@{revision(kind)} {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
