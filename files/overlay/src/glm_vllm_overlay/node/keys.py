"""`glm-vllm key`: the API keys of the gateway: one store for root, and the map that nginx reads, made from it."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import secrets
import sys

from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import locked, read_json, read_line, write_atomically
from glm_vllm_overlay.node.gateway import reload_nginx
from glm_vllm_overlay.node.paths import Paths

ACTIONS = ("new", "import", "list", "revoke", "map")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY = re.compile(r"[0-9a-f]{64}")
MAP_HEADER = "# Written by `glm-vllm key` from /etc/glm-vllm/api-keys; changes made here are lost.\n"


class Store:
    """The keys of one machine: `/etc/glm-vllm/api-keys` (0600) and `/etc/nginx/glm-vllm/keys.map` (0640).

    The document is `{"schema": 1, "keys": [{"name", "key", "created"}]}`, with 64 hex digits a key and ISO 8601 dates.
    """

    def __init__(self, paths: Paths) -> None:
        self.file = paths.root / "etc/glm-vllm/api-keys"
        self.map = paths.root / "etc/nginx/glm-vllm/keys.map"

    def load(self) -> list[dict[str, str]]:
        """The entries in order of making; [] before the first. Raises Unusable when the file is damaged."""
        if not self.file.exists():
            return []
        keys = read_json(self.file).get("keys")
        try:
            sound = all(NAME.fullmatch(entry["name"]) and KEY.fullmatch(entry["key"]) for entry in keys)
        except (TypeError, KeyError):
            sound = False
        if not sound:
            raise Unusable(f"{self.file} is not a key store: put a copy back, or remove it and make new keys")
        return keys

    def save(self, keys: list[dict[str, str]]) -> None:
        """Write store and map."""
        self.file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps({"schema": 1, "keys": keys}, indent=1) + "\n", 0o600)
        self.render(keys)

    def render(self, keys: list[dict[str, str]]) -> bool:
        """Write the map where it differs; returns whether it did.

        Each key is a regular expression: nginx compares those in letter case, and plain words not.
        """
        text = MAP_HEADER + "".join(f'"~^{entry["key"]}$" "{entry["name"]}";\n' for entry in keys)
        if self.map.exists() and read_line(self.map) == text.strip():
            return False
        self.map.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomically(self.map, text, 0o640)
        return True


def checked_name(name: str | None, action: str) -> str:
    """The name as given; raises Unusable when it is missing or unfit for a log line."""
    if name is None:
        raise Unusable(f"`glm-vllm key {action}` needs a name, such as `glm-vllm key {action} laptop`")
    if not NAME.fullmatch(name):
        raise Unusable("a key's name is 1 to 64 letters, digits, dots, dashes or underscores and begins with no sign")
    return name


def add(store: Store, name: str, key: str) -> None:
    """Store a key under a name that is free."""
    keys = store.load()
    if any(entry["name"] == name for entry in keys):
        raise Refusal(f"there is a key named {name} already: choose another name, or revoke it first")
    store.save([*keys, entry_of(name, key)])


def entry_of(name: str, key: str) -> dict[str, str]:
    """A store entry made now."""
    return {"name": name, "key": key, "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


def take(store: Store, name: str, key: str) -> bool:
    """Store a key that was made elsewhere, in place of another one of that name; returns whether anything changed."""
    if not KEY.fullmatch(key):
        raise Unusable(f"the key {name} is not 64 hex digits in lower case: make one with `openssl rand -hex 32`")
    keys = store.load()
    for entry in keys:
        if entry["key"] == key and entry["name"] != name:
            raise Refusal(
                f"{name} and {entry['name']} are the same key: give {name} one of its own, or revoke the other"
            )
    if any((entry["name"], entry["key"]) == (name, key) for entry in keys):
        return store.render(keys)
    store.save([*(entry for entry in keys if entry["name"] != name), entry_of(name, key)])
    return True


def revoke(store: Store, name: str) -> None:
    """Forget a key."""
    keys = store.load()
    left = [entry for entry in keys if entry["name"] != name]
    if len(left) == len(keys):
        known = ", ".join(entry["name"] for entry in keys) or "none"
        raise Refusal(f"there is no key named {name}; there are: {known}")
    store.save(left)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm key new|import|list|revoke|map [NAME] [--reload]`."""
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="new: make a key and print it once; import: take a key from standard input; list: names and dates; "
        "revoke: forget a key; map: write nginx's map again",
    )
    parser.add_argument("name", nargs="?", help="whose key it is; the only part that appears in logs")
    parser.add_argument("--reload", action="store_true", help="reload nginx, so that a change counts at once")


def act(args: argparse.Namespace, store: Store) -> tuple[dict, str]:
    """Do what was asked; returns what --json adds and what is printed without it."""
    if args.action == "list":
        keys = [{"name": entry["name"], "created": entry["created"]} for entry in store.load()]
        return {"keys": keys}, "\n".join(f"{entry['name']}  {entry['created']}" for entry in keys)
    if args.action == "map":
        changed = store.render(store.load())
        return {"changed": changed}, "written" if changed else "unchanged"
    name = checked_name(args.name, args.action)
    if args.action == "new":
        key = secrets.token_hex(32)
        add(store, name, key)
        return {"changed": True, "name": name, "key": key}, key
    if args.action == "import":
        changed = take(store, name, sys.stdin.read().strip())
        return {"changed": changed, "name": name}, "stored" if changed else "unchanged"
    revoke(store, name)
    return {"changed": True, "name": name}, "revoked"


def run(args: argparse.Namespace) -> int:
    """`glm-vllm key`: exit 0 when done, 1 for a taken or unknown name or a failed reload, 2 for unusable input."""
    if os.geteuid() != 0:
        raise Unusable(f"the API keys belong to root: run `sudo glm-vllm key {args.action}`")
    store = Store(node_paths.current())
    store.file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with locked(store.file.parent):
        document, text = act(args, store)
    # A new key is shown whatever nginx says: nothing shows it again.
    problem = reload_nginx() if args.reload and document.get("changed") else ""
    said = {"message": problem} if problem else {}
    print(json.dumps({"schema": 1, "ok": not problem, **document, **said}) if args.json else text)
    if problem:
        print(f"glm-vllm key: {problem}", file=sys.stderr)
    return 1 if problem else 0


def first_key(paths: Paths) -> str | None:
    """A key that the gateway takes, for this machine's own probes; None without one."""
    keys = Store(paths).load()
    return keys[0]["key"] if keys else None
