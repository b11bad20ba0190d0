"""`make demo`: two machines from nothing to an answer, and one screen that says what there is now."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import bed

QUESTION = "What joins the two machines?"
ANSWER = "Two small machines, one cable, one answer."
TIMES: dict[str, float] = {}


class DemoError(Exception):
    """The demo cannot go on; the message is one sentence and what to look at."""


@contextmanager
def step(text: str) -> Iterator[None]:
    start = time.monotonic()
    print(f"  {text:<58}", end="", flush=True)
    try:
        yield
    except BaseException:
        print(" failed")
        raise
    TIMES[text] = time.monotonic() - start
    print(f"{TIMES[text]:4.0f} s", flush=True)


def playbook(name: str) -> None:
    """Run a playbook on the twin; its output is shown only when it fails."""
    log = Path(tempfile.gettempdir()) / f"glm-vllm-demo-{os.getpid()}.log"
    sources = [argument for source in bed.inventory() for argument in ("-i", source)]
    with log.open("w") as out:
        done = subprocess.run(
            ["ansible-playbook", name, *sources],
            cwd=bed.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        print("\n".join(log.read_text().splitlines()[-60:]))
        raise DemoError(f"{name} ended with {done.returncode}; all of its output is in {log}")
    log.unlink()


def ask(endpoint: bed.Endpoint) -> tuple[str, float]:
    """The answer's text and its tokens per second."""
    start = time.monotonic()
    reply = endpoint.chat(QUESTION, temperature=0, max_tokens=64)
    seconds = time.monotonic() - start
    return reply["choices"][0]["message"]["content"].strip(), reply["usage"]["completion_tokens"] / seconds


def deployment() -> dict[str, object]:
    return json.loads(bed.on(bed.HEAD, "cat", "/var/lib/glm-vllm/deployments/current/deployment.json"))


def demo() -> None:
    with step("two machines"):
        bed.twin("clean")
        bed.twin("up")
    with step("a tiny checkpoint of the same architecture"):
        bed.checkpoint("chain")
    with step("site.yml"):
        playbook("site.yml")
    endpoint = bed.Endpoint()
    with step("a question"):
        ask(endpoint)  # the first request of an engine compiles; the second is what a user sees
        counted, before = endpoint.metrics(), bed.state_from_now(bed.WORKER)["rank"]["cpu_seconds"]
        answer, speed = ask(endpoint)
        now, after = endpoint.metrics(), bed.state_from_now(bed.WORKER)["rank"]["cpu_seconds"]
    if answer != ANSWER:
        raise DemoError(f"The pair answered {answer!r}, where the checkpoint spells {ANSWER!r}.")
    if after <= before:
        raise DemoError(f"Rank 1 on {bed.WORKER} used no processor time ({before} s before, {after} s after).")
    drafted, accepted = (
        now[name] - counted[name]
        for name in ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    )
    current = deployment()
    body = json.dumps({"model": bed.MODEL, "messages": [{"role": "user", "content": "Hello"}]})
    print(f"""
  nodes       {bed.HEAD} (head), {bed.WORKER} (worker)
  release     {current["release"]}, the same on both
  model       {current["model"]["name"]}@{current["model"]["revision"][:12]}
  executor    {current["executor"]}, tensor parallel 2
  endpoint    {bed.URL}/v1
  speed       {speed:.1f} tokens/s, {accepted:.0f} of {drafted:.0f} drafted tokens accepted
  rank 1      {1000 * (after - before):.1f} ms of processor time for that answer
  time        {sum(TIMES.values()):.0f} s in all

  It keeps running. Ask it yourself:
    twin/twin.sh ctl curl -s {bed.URL}/v1/chat/completions -H 'Authorization: Bearer {bed.api_key()}' \\
      -H 'Content-Type: application/json' -d '{body}'
  `make clean` takes it away.

  {QUESTION}
  {answer}""")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave by the way that ends what was started
    try:
        demo()
    except (DemoError, bed.BedError, bed.requests.RequestException, subprocess.CalledProcessError) as problem:
        print(f"demo: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
