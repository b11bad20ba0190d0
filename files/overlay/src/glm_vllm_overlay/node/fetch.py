"""`glm-vllm fetch JOB`: make a model folder complete, or say what is missing.

JOB is a JSON file (`-` is stdin), schema 1. With `--list` it names `sources` and `dir`, and the answer is the first
source that can be used with its files. Without, it names one model:
  name, revision, folder, files   what must be there (docs of `model`)
  origins     where missing files come from, {} of `carrier`, several for several ways to the same source; [] for none
  token, proxy, endpoint   for the hub, or for what is asked over HTTP
  only        of what is missing, the files that the origins have; all without it
  adopt       folders of this machine (patterns) that may hold the same files: models, or caches of the hub's client
  move        whether a file that was adopted loses its other name
  full        read every byte that is here, also of files that look unchanged
  streams     files brought at once
  reserve     bytes that stay free
  tries       without a byte of progress between them, after which a file cannot be had
  stall       seconds without a byte after which a stream is begun anew
Nothing is trusted before it is read: a file arrives in `.partial/`, its hash is compared, and only then it gets its
name. What is right is never brought again, and a broken run is gone on with.
"""

from __future__ import annotations

import argparse
import errno
import glob
import json
import os
import queue
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm_vllm_overlay.node import carrier
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node.carrier import Trouble
from glm_vllm_overlay.node.errors import Refusal, Unusable
from glm_vllm_overlay.node.files import read_json, write_atomically
from glm_vllm_overlay.node.model import (
    MANIFEST,
    PARTIAL,
    Findings,
    Model,
    Wanted,
    checked_files,
    fault,
    in_index,
    manifest_text,
    read,
)
from glm_vllm_overlay.node.sources import INDEX, TRIES, choose

WRONG_TRIES = 2  # of a file that arrives whole and wrong
RESERVE = 1 << 30
GIB = 1 << 30


def gib(size: float) -> str:
    """Size in GiB, one decimal."""
    return f"{size / GIB:.1f} GiB"


def span(seconds: float) -> str:
    """A time to wait, as people say it."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class Progress:
    """How far it is, in a file that `glm-vllm status` and the play read: done and total bytes, rate, seconds left."""

    def __init__(self, path: Path | None, what: str) -> None:
        self.path, self.what = path, what
        self.seen: deque[tuple[float, int]] = deque(maxlen=60)

    def show(self, done: int, total: int) -> None:
        """Write it down; the rate is that of the last half minute."""
        if not self.path:
            return
        now = time.monotonic()
        self.seen.append((now, done))
        began, first = next((point for point in self.seen if now - point[0] <= 30), self.seen[-1])
        rate = (done - first) / (now - began) if now > began else 0.0
        left = (total - done) / rate if rate > 0 else None
        says = f"{self.what}: {gib(done)} of {gib(total)}, {rate / 1e6:.0f} MB/s"
        says += f", {span(left)} left" if left is not None else ""
        document = {"schema": 1, "pid": os.getpid(), "what": self.what, "done": done, "total": total}
        document |= {"rate": round(rate), "left": None if left is None else round(left), "says": says}
        self.path.parent.mkdir(mode=0o755, exist_ok=True)
        write_atomically(self.path, json.dumps(document) + "\n")

    def clear(self) -> None:
        """Nothing is under way any more."""
        if self.path:
            self.path.unlink(missing_ok=True)


# ---- what is there already ------------------------------------------------------------------------------------------


class Candidates:
    """Files of this machine that may be the wanted ones; only reading them tells."""

    def __init__(self, folders: list[str], own: Path) -> None:
        found = [Path(path) for pattern in folders for path in sorted(glob.glob(pattern))]
        self.folders = [folder for folder in found if folder != own and folder.is_dir()]
        self.by_hash: dict[str, list[Path]] = {}
        for folder in self.folders:
            for blobs in (*folder.glob("blobs"), *folder.glob("models--*/blobs")):
                for file in blobs.rglob("*"):
                    self.by_hash.setdefault(file.name, []).append(file)

    def of(self, name: str, want: dict[str, Any]) -> Iterator[Path]:
        """Files with the wanted hash for a name in a client's cache, then those of the same name, all of that size."""
        named = self.by_hash.get(want["sha256"] or want["blob"] or "", [])
        for file in (*named, *(folder / name for folder in self.folders)):
            try:
                if file.is_file() and file.stat().st_size == want["size"]:
                    yield file
            except OSError:
                continue


def room(folder: Path, wanted: Wanted, candidates: Candidates) -> dict[str, int]:
    """Bytes: needed in all; present, complete or in part; adoptable without taking room; free; missing."""
    present = adoptable = 0
    top = folder
    while not top.exists():
        top = top.parent
    for name, want in wanted.items():
        file, part = folder / name, folder / PARTIAL / name
        if file.is_file() and file.stat().st_size == want["size"]:
            present += want["size"]
        elif any(path.stat().st_dev == top.stat().st_dev for path in candidates.of(name, want)):
            adoptable += want["size"]
        elif part.is_file():
            present += min(part.stat().st_size, want["size"])
    needed = sum(want["size"] for want in wanted.values())
    stat = os.statvfs(top)
    free = stat.f_bavail * stat.f_frsize
    return {
        "needed": needed,
        "present": present,
        "adoptable": adoptable,
        "missing": needed - present - adoptable,
        "free": free,
    }


def no_room(folder: Path, figures: dict[str, int], reserve: int) -> str:
    """Why what is missing does not fit, or ""."""
    lacking = figures["missing"] + reserve - figures["free"]
    if figures["missing"] == 0 or lacking <= 0:
        return ""
    return (
        f"{os.uname().nodename}: {folder} needs {gib(figures['needed'])} and has "
        f"{gib(figures['present'] + figures['adoptable'])} of it, {gib(figures['free'])} are free: make "
        f"{gib(lacking)} more room, or put model_fetch_dir on a larger file system"
    )


# ---- bringing -------------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """One of the workers, and what it is at."""

    carrier: Any
    part: Path | None = None
    size: int = 0
    since: float = 0.0


@dataclass
class Bringing:
    """Brings the wanted files `names` into a model folder by several streams."""

    model: Model
    wanted: Wanted
    origins: list[dict[str, Any]]
    streams: int
    stall: float
    tries: int
    backoff: float
    place: Callable[[str, Path], str]
    placed: list[str] = field(default_factory=list)
    failure: Exception | None = None

    def attempt(self, stream: Stream, name: str, part: Path) -> None:
        """Bring one file and give it its name; tries again while that can help. Raises Refusal."""
        want, label = self.wanted[name], carrier.label(stream.carrier.origin_of)
        fruitless = wrong = 0
        while True:
            before = part.stat().st_size if part.exists() else 0
            trouble = None
            try:
                stream.carrier.prepare()
                stream.size, stream.since, stream.part = before, time.monotonic(), part
                stream.carrier.bring(name, want, part)
            except Trouble as error:
                trouble = error
            finally:
                stream.part = None
            if self.failure:
                return
            if trouble is None:
                reason = self.place(name, part)
                if not reason:
                    return
                wrong += 1
                if wrong >= WRONG_TRIES:
                    raise Refusal(f"{reason}: {label} delivered it so {wrong} times, use another source")
                continue
            if trouble.kind == "disk":
                raise Refusal(f"{self.model.folder}: no room is left for {name}; make room and run again")
            after = part.stat().st_size if part.exists() else 0
            fruitless = 0 if after > before else fruitless + 1
            if not trouble.passing or fruitless >= self.tries:
                raise Refusal(f"{name} of {label}: {trouble}; run again, what has arrived stays")
            time.sleep(min(300.0, trouble.wait or self.backoff * 2 ** min(fruitless, 5)))

    def work(self, stream: Stream, names: queue.SimpleQueue[str]) -> None:
        """One worker: takes names until none are left or somebody failed."""
        try:
            while not self.failure:
                name = names.get_nowait()
                part = self.model.folder / PARTIAL / name
                part.parent.mkdir(parents=True, exist_ok=True)
                self.attempt(stream, name, part)
        except queue.Empty:
            pass
        except Exception as error:  # is raised in the main thread
            self.failure = self.failure or error
        finally:
            stream.carrier.stop()

    def run(self, names: list[str], progress: Progress) -> None:
        """Bring `names`, the largest first; raises what the first worker that failed raised."""
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in sorted(names, key=lambda name: (-self.wanted[name]["size"], name)):
            waiting.put(name)
        workers = []
        for number in range(min(self.streams, len(names))):
            origin = self.origins[number % len(self.origins)]
            stream = Stream(carrier.make(origin))
            stream.carrier.origin_of = origin
            workers.append((stream, threading.Thread(target=self.work, args=(stream, waiting), daemon=True)))
        for _, thread in workers:
            thread.start()
        total = sum(self.wanted[name]["size"] for name in names)
        shown = 0.0
        while any(thread.is_alive() for _, thread in workers):
            time.sleep(0.05)
            for stream, _ in workers:
                self.watch(stream)
            if time.monotonic() - shown >= 1:
                shown = time.monotonic()
                done = sum(self.wanted[name]["size"] for name in list(self.placed))
                progress.show(min(total, done + sum(sizes(self.model.folder / PARTIAL))), total)
        if self.failure:
            raise self.failure

    def watch(self, stream: Stream) -> None:
        """End what has brought no byte for too long, or all of it once somebody failed."""
        part = stream.part
        if part is None:
            return
        size = part.stat().st_size if part.exists() else 0
        if size != stream.size:
            stream.size, stream.since = size, time.monotonic()
        if self.failure or time.monotonic() - stream.since > self.stall:
            stream.carrier.stop()
            stream.since = time.monotonic()


def sizes(folder: Path) -> Iterator[int]:
    """Sizes of all files below a folder."""
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path.stat().st_size
        except OSError:  # it got its name meanwhile
            continue


class Fetch:
    """One job on one model folder."""

    def __init__(self, job: dict[str, Any], progress: Path | None) -> None:
        self.job, self.progress = job, progress
        self.folder = Path(job["folder"])
        self.wanted = checked_files(job["files"], f"the list of files of {job['name']}")
        self.model = Model(self.folder, full=bool(job.get("full")))
        self.reserve = int(job.get("reserve", RESERVE))
        self.candidates = Candidates(job.get("adopt", []), self.folder)
        self.adopted: list[str] = []
        self.brought: list[str] = []
        self.learnt: dict[str, str] = {}
        self.guard = threading.Lock()

    def known_hashes(self) -> None:
        """Take hashes that an earlier run recorded; raises Refusal when the source names others now."""
        for name, entry in self.model.manifest().get("files", {}).items():
            want = self.wanted.get(name)
            if want is None:
                continue
            if want["sha256"] and want["sha256"] != entry["sha256"]:
                raise Refusal(
                    f"the source names another SHA-256 for {name} than {self.folder / MANIFEST}, which was learnt "
                    "first, for the same revision: do not trust it, or remove that folder to learn anew"
                )
            if not want["sha256"] and want["size"] == entry["size"]:
                want["sha256"] = entry["sha256"]

    def place(self, name: str, part: Path) -> str:
        """Prove what has arrived and give it its name; returns why not, and then it is gone."""
        want = self.wanted[name]
        if part.stat().st_size != want["size"]:
            reason = f"{name} has {part.stat().st_size} bytes instead of {want['size']}"
        else:
            with part.open("rb") as file:
                os.fsync(file.fileno())
            digest, blob = read(part, None if want["sha256"] else want["size"])
            reason = fault(name, want, digest, blob)
        if reason:
            part.unlink()
            return reason
        if part.stat().st_mode & 0o444 != 0o444:
            part.chmod(0o644)
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, target)
        stat = target.stat()
        with self.guard:
            self.learnt[name] = digest
            self.model.remember(
                self.model.known | {name: [stat.st_size, stat.st_mtime_ns, stat.st_ino, digest]},
            )
        return ""

    def adopt(self, names: list[str]) -> None:
        """Take what this machine has elsewhere."""
        progress = Progress(self.progress, f"taking {self.job['name']} from this machine")
        total = sum(self.wanted[name]["size"] for name in names)
        for name in names:
            part = self.folder / PARTIAL / name
            for source in self.candidates.of(name, self.wanted[name]):
                part.parent.mkdir(parents=True, exist_ok=True)
                carrier.share(source, part)
                if not self.place(name, part):
                    self.adopted.append(name)
                    if self.job.get("move"):
                        source.resolve().unlink(missing_ok=True)
                    break
            progress.show(sum(self.wanted[name]["size"] for name in self.adopted), total)

    def clean(self, missing: list[str]) -> None:
        """Keep of what was arriving only what is still wanted."""
        keep = {self.folder / PARTIAL / name for name in missing}
        for path in sorted((self.folder / PARTIAL).rglob("*"), reverse=True):
            if path.is_dir():
                if not any(path.iterdir()):
                    path.rmdir()
            elif path not in keep:
                path.unlink()
        if not missing:
            shutil.rmtree(self.folder / PARTIAL, ignore_errors=True)

    def bring(self, names: list[str]) -> None:
        """Take what is here elsewhere, then bring the rest; raises Refusal where that fails. The flag is gone."""
        for name in names:  # a wrong file is of no use, and its room is wanted
            (self.folder / name).unlink(missing_ok=True)
        self.model.remember({name: entry for name, entry in self.model.known.items() if name not in names})
        self.clean(names)
        if self.candidates.folders:
            self.adopt(names)
        only = self.job.get("only")
        missing = [name for name in names if name not in self.learnt and (only is None or name in only)]
        origins = [carrier.through(origin, self.job) for origin in self.job.get("origins", [])]
        if missing and origins:
            self.refuse_without_room()
            progress = Progress(self.progress, f"fetching {self.job['name']} from {carrier.label(origins[0])}")
            bringing = Bringing(
                self.model,
                self.wanted,
                origins,
                int(self.job.get("streams", 8)),
                float(self.job.get("stall", 60)),
                int(self.job.get("tries", TRIES)),
                float(self.job.get("backoff", 1)),
                lambda name, part: self.placed(bringing, name, part),
            )
            # The index first: it tells at once when the upload is short.
            index = [name for name in missing if name == INDEX]
            for group in (index, [name for name in missing if name not in index]):
                in_index(self.folder / INDEX, self.wanted, carrier.label(origins[0]))
                if group:
                    bringing.run(group, progress)

    def placed(self, bringing: Bringing, name: str, part: Path) -> str:
        """`place` for what came from a source."""
        reason = self.place(name, part)
        if not reason:
            with self.guard:
                self.brought.append(name)
                bringing.placed.append(name)
        return reason

    def refuse_without_room(self) -> None:
        """Raises Refusal when what is missing does not fit."""
        if reason := no_room(self.folder, room(self.folder, self.wanted, self.candidates), self.reserve):
            raise Refusal(reason)

    def look(self) -> Findings:
        """What is here, with the progress of the reading."""
        progress = Progress(self.progress, f"verifying {self.job['name']}")
        total = sum(want["size"] for want in self.wanted.values())
        done, shown = 0, time.monotonic()

        def tell(count: int) -> None:
            nonlocal done, shown
            done += count
            if time.monotonic() - shown >= 1:
                shown = time.monotonic()
                progress.show(done, total)

        return self.model.check(self.wanted, tell)

    def run(self) -> dict[str, Any]:
        """The whole job; returns the answer."""
        began = time.monotonic()
        self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with self.model.locked():
            self.known_hashes()
            findings = self.look()
            changed = False
            self.model.remember(findings.digests)
            self.learnt = {name: self.model.known[name][3] for name in self.wanted if name not in findings.wrong}
            if findings.wrong:
                changed = self.model.distrust()
                self.bring(list(findings.wrong))
            missing = [name for name in self.wanted if name not in self.learnt]
            self.clean(missing)
            manifest = None
            if not missing:
                complete = {name: want | {"sha256": self.learnt[name]} for name, want in self.wanted.items()}
                text = manifest_text(self.job["name"], self.job["revision"], complete)
                changed = self.model.vouch(text) or changed
                manifest = json.loads(text)
        return {
            "changed": changed or bool(self.adopted or self.brought),
            "verified": not missing,
            "missing": missing,
            "found_wrong": findings.wrong,
            "adopted": sorted(self.adopted),
            "brought": sorted(self.brought),
            "bytes_brought": sum(self.wanted[name]["size"] for name in self.brought),
            "bytes_read": findings.bytes_read,
            "seconds": round(time.monotonic() - began, 1),
            "manifest": manifest,
        }

    def foretell(self) -> dict[str, Any]:
        """What `run` would find and do, without a change: files of the right size count as right."""
        missing = []
        for name, want in self.wanted.items():
            file = self.folder / name
            if file.is_symlink() or not file.is_file() or file.stat().st_size != want["size"]:
                missing.append(name)
        figures = room(self.folder, self.wanted, self.candidates)
        return {
            "changed": bool(missing),
            "verified": not missing,
            "missing": missing,
            "room": figures,
            "no_room": no_room(self.folder, figures, self.reserve),
            "manifest": self.model.manifest() or None,
        }


# ---- the command ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `glm-vllm fetch`."""
    parser.add_argument("job", help="a JSON file, or - for stdin")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="choose a source and list its files")
    what.add_argument("--plan", action="store_true", help="say what is missing and whether there is room for it")


def load(job: str) -> dict[str, Any]:
    """The job; its file is removed, since it may hold a secret. Raises Unusable."""
    if job != "-":
        document = read_json(Path(job))
        Path(job).unlink()
        return document
    try:
        document = json.load(sys.stdin)
    except ValueError as error:
        raise Unusable(f"the job on stdin is no JSON ({error})") from None
    return document


def run(args: argparse.Namespace) -> int:
    """`glm-vllm fetch`: exit 0 with the answer as JSON; a folder that stays incomplete without a source is no error."""
    job = load(args.job)
    if args.list:
        answer = choose(job)
    elif args.plan:
        answer = Fetch(job, None).foretell()
    else:
        progress = node_paths.current().transfer
        try:
            answer = Fetch(job, progress).run()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise Refusal(f"{job['folder']}: no room is left; make room and run again") from None
        finally:
            Progress(progress, "").clear()
    print(json.dumps({"schema": 1, "ok": True} | answer))
    return 0
