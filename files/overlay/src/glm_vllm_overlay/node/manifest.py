"""`glm-vllm manifest`: the list of a model's files with size and SHA-256, for `files/manifests/` or beside the files.

From a folder every byte is read. From the hub (`--hub`, with the tool's interpreter) nothing is downloaded: its own
digests are written down, and small files, for which it names no SHA-256, are left to be learnt at the first fetch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from glm_vllm_overlay.node.carrier import Hub, Trouble
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.model import Wanted, checked_files, folder_revision, list_folder, read, text_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `glm-vllm manifest`."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("folder", nargs="?", type=Path, help="a folder with all files of the model")
    where.add_argument("--hub", metavar="OWNER/NAME", help="a repository of the hub; needs --revision")
    parser.add_argument("--revision", help="commit, 40 hex digits; by default one made from the folder's files")
    parser.add_argument("--name", help="name of the model; by default the last part of the folder or repository")
    parser.add_argument("--endpoint", default="", help="address of a mirror of the hub")
    parser.add_argument("--output", type=Path, help="write it there instead of printing it")


def from_folder(top: Path) -> tuple[str, Wanted]:
    """A folder's own revision and its files, every byte read."""
    if not top.is_dir():
        raise Unusable(f"{top} is not a folder")
    found = list_folder(top)
    files = {name: {"size": stat.st_size, "sha256": read(top / name)[0]} for name, stat in found.items()}
    return folder_revision(found), checked_files(files, str(top))


def from_hub(args: argparse.Namespace) -> tuple[str, Wanted]:
    """A repository's commit and its files, as the hub lists them."""
    if not args.revision:
        raise Unusable("--hub needs --revision: a branch may move")
    hub = Hub({"repo": args.hub, "revision": args.revision, "endpoint": args.endpoint})
    try:
        return args.revision, checked_files(hub.listing(), args.hub)
    except Trouble as error:
        raise Unusable(f"{args.hub} cannot be listed: {error}") from None
    finally:
        hub.stop()


def document(name: str, revision: str, files: Wanted) -> dict[str, Any]:
    """The manifest; a hash that nobody knows yet is left out, and what the hub calls such a file is kept."""
    entries = {
        path: {key: entry[key] for key in ("size", "sha256", "blob") if entry[key] is not None}
        for path, entry in files.items()
    }
    return {"schema": 1, "name": name, "revision": revision, "files": entries}


def run(args: argparse.Namespace) -> int:
    """`glm-vllm manifest`: exit 0 with the manifest written or printed."""
    own, files = from_hub(args) if args.hub else from_folder(args.folder)
    name = args.name or Path(args.hub or args.folder.resolve()).name
    text = text_of(document(name, args.revision or own, files))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text, encoding="utf-8")
        said = f"{len(files)} files, {sum(entry['size'] for entry in files.values())} bytes: {args.output}"
        print(json.dumps({"schema": 1, "ok": True, "message": said}) if args.json else said)
    else:
        print(text, end="")
    return 0
