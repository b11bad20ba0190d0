"""Traffic like that of a day's clients against an endpoint that serves: right, fair, and at rest when they are gone.

    python traffic.py URL {checks,fairness,trace} [--key KEY] [--model NAME] [--expect TEXT] [--minutes N] [--out JSON]

checks: stop strings, logprobs, n > 1, a streamed tool call, cancelled streams, 64 clients at once. fairness: the gaps
between the tokens of one stream, alone and beside a long prefill; p99 there has to be within three times the median
here. trace: twelve turns of an agent in three sessions at a time, over and over. Each ends with the counters: nothing
runs or waits, and the KV cache is as empty as before. TEXT is what the model answers (the twin's always does), else any
answer will do. `--memory COMMAND` prints the engine's bytes and is asked before, in the middle and after a trace.
Exit 0 when all of it held; the document is {"schema": 1, "ok": …, "problems": […], "figures": {…}}.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import requests

QUESTION = "What joins the two machines?"
SESSIONS, TURNS = 3, 12
FAIR = 3.0  # times the median
TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "parameters": {"type": "object", "properties": {"unit": {"type": "string"}}, "required": ["unit"]},
    },
}


class Client:
    """One endpoint; each thread has a session of its own."""

    def __init__(self, url: str, key: str, model: str, expect: str) -> None:
        self.url, self.key, self.model, self.expect = url.rstrip("/"), key, model, expect
        self.local = threading.local()

    def post(self, path: str, **body: Any) -> requests.Response:
        if not hasattr(self.local, "session"):
            self.local.session = requests.Session()
            self.local.session.trust_env = False
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        body = {"model": self.model, **body}
        answer = self.local.session.post(
            self.url + path, json=body, headers=headers, timeout=600, stream=bool(body.get("stream"))
        )
        if answer.status_code != 200:
            raise AssertionError(f"{path} answered {answer.status_code}: {answer.text[:200]}")
        return answer

    def chat(self, text: str = QUESTION, **body: Any) -> list[dict[str, Any]]:
        """The choices of a reply to one message, or to `messages`."""
        messages = body.pop("messages", [{"role": "user", "content": text}])
        body = {"temperature": 0, "max_tokens": 64} | body
        return self.post("/v1/chat/completions", messages=messages, **body).json()["choices"]

    def stream(self, path: str, **body: Any) -> Iterator[dict[str, Any]]:
        """Events of a stream; leaving the loop cancels the request."""
        with closing(self.post(path, stream=True, **body)) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def right(self, text: str | None) -> None:
        said = (text or "").strip()
        assert said == self.expect if self.expect else said and "\ufffd" not in said, f"another text: {said[:80]!r}"

    def counters(self) -> dict[str, float]:
        """Requests that run and wait, and the share of the KV cache in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        text = requests.get(f"{self.url}/metrics", timeout=30).text
        found = {name: re.findall(rf"^vllm:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE) for name in names}
        return {name: sum(map(float, values)) for name, values in found.items()}

    def rested(self, idle: dict[str, float], seconds: float = 30) -> None:
        """AssertionError when the counters do not come back to what they were at rest."""
        end = time.monotonic() + seconds
        while (now := self.counters()) != idle:
            assert time.monotonic() < end, f"not at rest after {seconds:.0f} s: {now}, before {idle}"
            time.sleep(0.5)


# ---- checks ---------------------------------------------------------------------------------------------------------
def stop_strings(client: Client) -> None:
    (plain,) = client.chat()
    words = plain["message"]["content"].split()
    (cut,) = client.chat(stop=[words[len(words) // 2]])
    said = cut["message"]["content"]
    assert cut["finish_reason"] == "stop" and words[len(words) // 2] not in said
    assert not client.expect or plain["message"]["content"].startswith(said)


def logprobs(client: Client) -> None:
    (choice,) = client.chat(logprobs=True, top_logprobs=3)
    for token in choice["logprobs"]["content"]:
        best = [other["logprob"] for other in token["top_logprobs"]]
        assert len(best) >= 3 and best[:3] == sorted(best[:3], reverse=True) and max(best) <= 0
        assert token["logprob"] == max(best), "greedy is not the best of them"


def several(client: Client) -> None:
    choices = client.chat(n=4, temperature=0.01)  # vLLM refuses several greedy ones
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice in choices:
        client.right(choice["message"]["content"])


def streamed_tool_call(client: Client) -> None:
    name, arguments = "", ""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 64}
    for event in client.stream("/v1/chat/completions", tools=[TOOL], tool_choice="required", **body):
        for choice in event["choices"]:
            for call in choice["delta"].get("tool_calls") or []:
                name += call["function"].get("name") or ""
                arguments += call["function"].get("arguments") or ""
    assert name == "measure" and isinstance(json.loads(arguments), dict), (name, arguments)


def cancelled(client: Client) -> None:
    idle = client.counters()

    def leave(_: int) -> None:
        body = {"prompt": QUESTION, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        for number, _event in enumerate(client.stream("/v1/completions", **body)):
            if number == 2:
                return
        raise AssertionError("the stream ended by itself")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave, range(8)))
    client.rested(idle)
    client.right(client.chat()[0]["message"]["content"])


def many_clients(client: Client) -> None:
    with ThreadPoolExecutor(64) as pool:
        for choices in pool.map(lambda _: client.chat(), range(64)):
            client.right(choices[0]["message"]["content"])


CHECKS: tuple[Callable[[Client], None], ...] = (
    stop_strings, logprobs, several, streamed_tool_call, cancelled, many_clients,
)  # fmt: skip


def checks(client: Client, options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    problems, figures = [], {}
    for check in CHECKS:
        began = time.monotonic()
        try:
            check(client)
        except (AssertionError, requests.RequestException, KeyError, IndexError) as error:
            problems.append(f"{check.__name__}: {type(error).__name__}: {error}")
        figures[check.__name__] = round(time.monotonic() - began, 1)
    return problems, figures


# ---- fairness -------------------------------------------------------------------------------------------------------
def gaps(client: Client, tokens: int, marks: list[float]) -> list[float]:
    """Seconds between the pieces of one stream; the moments of its pieces go into `marks`."""
    body = {"prompt": QUESTION, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    for _ in client.stream("/v1/completions", **body):
        marks.append(time.monotonic())
    return [after - before for before, after in zip(marks, marks[1:], strict=False)]


def fairness(client: Client, options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    alone = gaps(client, options.tokens, [])
    median = statistics.median(alone)
    marks: list[float] = []
    spans: list[tuple[float, float]] = []

    def prefill() -> None:
        while len(marks) < 5:
            time.sleep(0.01)
        for number in range(options.prefills):
            words = " ".join(f"{number} {word}" for word in range(options.words))
            began = time.monotonic()
            client.post("/v1/completions", prompt=words, max_tokens=1, temperature=0)
            spans.append((began, time.monotonic()))

    other = threading.Thread(target=prefill)
    other.start()
    gaps(client, options.tokens, marks)
    other.join()
    pairs = list(zip(marks, marks[1:], strict=False))
    beside = [b - a for a, b in pairs if any(b > start and a < end for start, end in spans)]
    figures = {
        "median alone, ms": round(median * 1e3, 1),
        "gaps beside a prefill": len(beside),
        "median beside, ms": round(statistics.median(beside) * 1e3, 1) if beside else None,
        "p99 beside, ms": round(percentile(beside, 0.99) * 1e3, 1) if beside else None,
        "ratio": round(percentile(beside, 0.99) / median, 2) if beside else None,
        "prefills, s": [round(end - start, 2) for start, end in spans],
    }
    problems = [] if beside else ["the stream was over before a prefill began: ask for more --tokens"]
    if beside and figures["ratio"] > FAIR:
        problems.append(f"p99 beside a prefill is {figures['ratio']} times the median without, more than {FAIR:g}")
    return problems, figures


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values that is not below this share of them."""
    return sorted(values)[max(0, -(-len(values) * share // 1).__int__() - 1)]


# ---- trace ----------------------------------------------------------------------------------------------------------
def conversation(client: Client, session: int, number: int) -> int:
    """Twelve turns, each with all of the earlier ones; the number of replies."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"Session {session}, conversation {number}."}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{QUESTION} Step {turn}."})
        if turn == 4:
            streamed_tool_call(client)
        if turn % 3 == 2:
            body = {"messages": messages, "temperature": 0, "max_tokens": 64}
            events = client.stream("/v1/chat/completions", **body)
            said = "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])
        else:
            said = client.chat(messages=messages)[0]["message"]["content"]
        client.right(said)
        messages.append({"role": "assistant", "content": said})
    return TURNS


def trace(client: Client, options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    def memory() -> int | None:
        if not options.memory:
            return None
        return int(subprocess.run(shlex.split(options.memory), capture_output=True, text=True, check=True).stdout)

    began, end = time.monotonic(), time.monotonic() + 60 * options.minutes
    problems: list[str] = []
    replies = [0] * SESSIONS
    sizes = [memory()]

    def session(which: int) -> None:
        number = 0
        while time.monotonic() < end:
            try:
                replies[which] += conversation(client, which, number)
            except (AssertionError, requests.RequestException, KeyError, IndexError) as error:
                problems.append(f"session {which}, conversation {number}: {type(error).__name__}: {error}")
            number += 1

    threads = [threading.Thread(target=session, args=(which,)) for which in range(SESSIONS)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, 30 * options.minutes))
    sizes.append(memory())
    for thread in threads:
        thread.join()
    sizes.append(memory())
    # What the first half filled (caches of grammars, prefixes, allocators) is there; the second may not add to it.
    if sizes[1] and sizes[2] > 1.05 * sizes[1]:
        problems.append(f"the engine's memory grew in the second half: {sizes}")
    return problems[:20], {"replies": replies, "minutes": round((time.monotonic() - began) / 60, 2), "bytes": sizes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("what", choices=("checks", "fairness", "trace"))
    parser.add_argument("--key", default="")
    parser.add_argument("--model", default="GLM-5.3-Flash-EXL3")
    parser.add_argument("--expect", default="", help="the only answer")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--memory", default="", help="see above")
    parser.add_argument("--tokens", type=int, default=400, help="of the stream whose gaps are measured")
    parser.add_argument("--words", type=int, default=20000, help="of a long prompt")
    parser.add_argument("--prefills", type=int, default=1, help="long prompts, one after the other")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    client = Client(options.url, options.key, options.model, options.expect)
    client.chat(max_tokens=4)  # the first request of an engine is no measure
    idle = client.counters()
    problems, figures = globals()[options.what](client, options)
    try:
        client.rested(idle)
    except AssertionError as error:
        problems.append(str(error))
    document = {"schema": 1, "ok": not problems, "problems": problems, "figures": figures | {"at rest": idle}}
    text = json.dumps(document, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    return 0 if document["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
