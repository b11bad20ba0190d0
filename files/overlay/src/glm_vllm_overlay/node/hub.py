"""A child process that speaks to the model hub with its own client, `huggingface_hub`.

The only module here that needs more than the standard library; it runs in the tool's environment. Requests come as
JSON lines on stdin, answers leave as JSON lines on stdout: {"ok": true, ...}, or {"ok": false, "kind", "message",
"wait"} with a kind of absent, denied, busy, network, disk or other, and the seconds that the hub asks to wait.
A parent that sees no progress ends this process; what has arrived stays, and the next one goes on there.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

CHUNK = 1 << 18  # written at a time: the client's 10 MiB would hide progress and be lost with a broken connection
KINDS = {401: "denied", 403: "denied", 404: "absent", 410: "absent", 408: "busy", 429: "busy"}


def listing(hub: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Every file of a repository at a commit: {path: {"size", "sha256", "blob"}}."""
    info = hub.HfApi(endpoint=request["endpoint"] or None).model_info(
        request["repo"], revision=request["revision"], files_metadata=True, timeout=30, token=request["token"] or False
    )
    if info.sha != request["revision"]:
        return {"ok": False, "kind": "other", "message": f"the hub answers with commit {info.sha}", "wait": 0}
    files = {}
    for entry in info.siblings or []:
        if not any(part.startswith(".") for part in Path(entry.rfilename).parts):
            digest = entry.lfs.sha256 if entry.lfs else None
            files[entry.rfilename] = {"size": entry.size, "sha256": digest, "blob": None if digest else entry.blob_id}
    return {"ok": True, "files": files}


def get(hub: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Bring one file to `to`, going on where it ends.

    The client's own download function keeps nothing of an earlier process's work, so this uses the parts it is made
    of: the file's metadata, and its HTTP transfer, which takes the length that is there already.
    """
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    name, want, token = request["name"], request["want"], request["token"] or False
    url = hub.hf_hub_url(request["repo"], name, revision=request["revision"], endpoint=request["endpoint"] or None)
    meta = hub.get_hf_file_metadata(url, token=token, timeout=30, endpoint=request["endpoint"] or None)
    promised = want["sha256"] or want["blob"]
    if meta.commit_hash != request["revision"]:
        message = f"{name} is offered at commit {meta.commit_hash}"
    elif meta.size is not None and meta.size != want["size"]:
        message = f"{name} is offered with {meta.size} bytes instead of {want['size']}"
    elif promised and meta.etag and len(meta.etag) == len(promised) and meta.etag != promised:
        message = f"{name} is offered with hash {meta.etag[:12]} instead of {promised[:12]}"
    else:
        message = ""
    if message:
        return {"ok": False, "kind": "other", "message": message, "wait": 0}
    headers = build_hf_headers(token=token)
    if urlparse(meta.location).netloc != urlparse(url).netloc:
        headers.pop("authorization", None)  # the token is the hub's, not its storage's
    with open(os.open(request["to"], os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
        have = file.seek(0, os.SEEK_END)
        if have > want["size"]:
            have = file.seek(0)
            file.truncate()
        http_get(meta.location, file, resume_size=have, headers=headers, expected_size=want["size"])
    return {"ok": True}


def trouble(error: Exception) -> dict[str, Any]:
    """An exception of the client, of its HTTP library or of the disk as an answer."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    wait = 0.0
    if status is not None:
        kind = KINDS.get(status, "busy" if status >= 500 else "other")
        try:
            wait = float(response.headers.get("retry-after") or 0)
        except ValueError:
            pass  # an HTTP date: our own waiting time serves
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = "disk"
    else:
        kind = "network"
    lines = str(error).strip().splitlines()
    return {"ok": False, "kind": kind, "message": lines[0] if lines else type(error).__name__, "wait": wait}


def main() -> None:
    """Answer requests until stdin ends."""
    os.environ["HF_HUB_DISABLE_XET"] = "1"  # its transfers stall for half an hour at a time
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants

        constants.DOWNLOAD_CHUNK_SIZE = CHUNK
    except ImportError:
        message = "huggingface_hub is not installed for this interpreter"
        hub, missing = None, {"ok": False, "kind": "other", "message": message, "wait": 0}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = (
                missing
                if hub is None
                else {"list": listing, "get": get, "nothing": lambda *_: {"ok": True}}[request["do"]](hub, request)
            )
        except Exception as error:  # the client raises its own, its HTTP library's and the system's errors
            answer = trouble(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
