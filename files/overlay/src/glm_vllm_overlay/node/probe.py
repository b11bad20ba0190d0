"""`glm-vllm probe`: ask the endpoint as a client does, on the head and as root, and check what comes back.

The checks run in the order of CHECKS and stop at the first that fails, so that the one thing that is broken is the one
that is named. Each fails with one sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import ssl
import sys
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from glm_vllm_overlay.node import fabric as node_fabric
from glm_vllm_overlay.node import paths as node_paths
from glm_vllm_overlay.node import state
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.files import read_line
from glm_vllm_overlay.node.keys import first_key
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.peer import Silent, ask_peer
from glm_vllm_overlay.node.serve import config_value

PROMPT = "Say hello in one sentence."
TOKENS = 64
# One token proves that both ranks work; a hung one would keep a client waiting for as long as it likes.
TOKEN_PATIENCE = 120.0
ANSWER_PATIENCE = 300.0
STATE_PATIENCE = 5.0
JOURNAL = "look at `glm-vllm status` and `journalctl -u glm-vllm-head`"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Failed(Exception):
    """A check that did not pass; says in one sentence what is wrong and what to do."""


def pinned(certificate: Path) -> ssl.SSLContext:
    """Trust in this machine's own certificate and no other; it need not name the loopback address that is asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(certificate)
    except OSError as error:  # ssl.SSLError is one
        raise Unusable(f"{certificate} cannot be used ({error}): run playbooks/serve.yml") from None
    return context


class Door:
    """The HTTP or HTTPS endpoint, asked with or without a key."""

    def __init__(self, url: str, key: str | None, certificate: Path) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Unusable(f"{url} is not an address such as http://127.0.0.1:8888")
        self.url, self.host, self.key = url.rstrip("/"), parts.hostname, key
        self.port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        self.trust = pinned(certificate) if parts.scheme == "https" else None

    @contextlib.contextmanager
    def ask(
        self, path: str, body: dict | None = None, key: str | None = None, timeout: float = 10.0
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to one request, still open; `timeout` in seconds between any two bytes. Raises Failed."""
        if self.trust:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=timeout, context=self.trust)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        headers = {"Content-Type": "application/json"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
            yield connection.getresponse()
        except TimeoutError:
            raise Failed(f"{path} has not answered within {timeout:.0f} s: {JOURNAL}") from None
        except (OSError, http.client.HTTPException) as error:
            raise Failed(f"{self.url}{path} does not answer ({error}): look at `systemctl status nginx`") from None
        finally:
            connection.close()

    def get(self, path: str, key: str | None = None) -> tuple[int, str]:
        """Status and text of a GET."""
        with self.ask(path, key=key) as answer:
            return answer.status, answer.read().decode(errors="replace")

    def post(self, path: str, body: dict, timeout: float) -> dict:
        """The JSON document that a POST with the key returns; raises Failed for any other status than 200."""
        with self.ask(path, body, self.key, timeout) as answer:
            return document(path, answer.status, answer.read().decode(errors="replace"))

    def stream(self, path: str, body: dict, timeout: float) -> Iterator[dict]:
        """The server-sent events of a POST with the key, as they arrive; raises Failed."""
        with self.ask(
            path, body | {"stream": True, "stream_options": {"include_usage": True}}, self.key, timeout
        ) as answer:
            if answer.status != 200:
                document(path, answer.status, answer.read().decode(errors="replace"))
            for line in answer:
                data = line.decode(errors="replace").strip().removeprefix("data:").strip()
                if line.startswith(b"data:") and data != "[DONE]":
                    yield document(path, 200, data)


def document(path: str, status: int, text: str) -> dict:
    """The JSON object of an answer with status 200; raises Failed with the server's own words otherwise."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    error = found.get("error") if isinstance(found, dict) else None
    if status == 200 and isinstance(found, dict) and not error:
        return found
    words = error.get("message") if isinstance(error, dict) else None
    raise Failed(f"{path} answers {status} ({words or ' '.join(text.split())[:200] or 'nothing'}): {JOURNAL}")


def counters(text: str, name: str) -> float:
    """The sum over all labels of the counter `vllm:<name>` in Prometheus text; 0 when it is not there."""
    found = re.findall(rf"^vllm:{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for value in found)


def fabric_bytes(node: dict) -> int:
    """Bytes that a node's rails have carried so far."""
    return sum(rail["rx_bytes"] + rail["tx_bytes"] for rail in node["fabric"]["rails"])


def share(before: dict, after: dict) -> tuple[float, int]:
    """Processor seconds of a rank and bytes on its rails, between two of its node's documents."""
    worked = after["rank"]["cpu_seconds"] - before["rank"]["cpu_seconds"]
    return worked, fabric_bytes(after) - fabric_bytes(before)


def deployed_speculator(paths: Paths) -> str:
    """The speculator that this deployment's unit names, whatever `systemctl edit` has made of it since."""
    unit = read_line(paths.deployment.parent / "units/glm-vllm-head.service")
    found = re.search(r"\bGLM_SPECULATOR=(\w+)", unit)
    if not found:
        raise Failed("the deployed glm-vllm-head.service names no speculator: run playbooks/serve.yml")
    return found.group(1)


class Probe:
    """One run over the checks; `measured` fills with what they found."""

    def __init__(self, paths: Paths, args: argparse.Namespace) -> None:
        config = read_line(paths.serve_yaml)
        self.paths, self.expect = paths, args.expect
        self.door = Door(args.url, first_key(paths), paths.tls / "server.crt")
        self.model = config_value(config, "served-model-name") or ""
        self.question = {
            "model": self.model,
            "messages": [{"role": "user", "content": PROMPT}],
            "temperature": 0,
            "max_tokens": TOKENS,
        }
        self.measured: dict = {}
        self.answer = ""
        self.metrics_before = ""
        self.peer_before: dict | Silent | Unusable

    def health(self) -> None:
        """The engine is up, and the door to it is open."""
        status, text = self.door.get("/health")
        if status != 200:
            document("/health", status, text)
            raise Failed(f"/health answers {status}: {JOURNAL}")
        self.metrics_before = self.door.get("/metrics", self.door.key)[1]
        self.peer_before = self.ask_peer()

    def key(self) -> None:
        """A key of the store opens the door."""
        if not self.door.key:
            raise Failed("/etc/glm-vllm/api-keys holds no key: run `glm-vllm key new default --reload`")
        if self.door.get("/v1/models", self.door.key)[0] == 401:
            raise Failed("the gateway refuses a key of /etc/glm-vllm/api-keys: run `glm-vllm key map --reload`")

    def models(self) -> None:
        """The model goes by the name that clients send."""
        status, text = self.door.get("/v1/models", self.door.key)
        names = [entry["id"] for entry in document("/v1/models", status, text)["data"]]
        if self.model not in names:
            raise Failed(
                f"the engine serves {', '.join(names) or 'nothing'} and not {self.model}: "
                "set glm_vllm_overlay_served_name and run playbooks/serve.yml"
            )

    def one_token(self) -> None:
        """Both ranks get through one step."""
        body = {"model": self.model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        answer = self.door.post("/v1/completions", body, TOKEN_PATIENCE)
        if answer["usage"]["completion_tokens"] != 1:
            raise Failed(f"one token was asked for and {answer['usage']['completion_tokens']} came: {JOURNAL}")

    def chat(self) -> None:
        """A chat gets an answer in words."""
        message = self.door.post("/v1/chat/completions", self.question, ANSWER_PATIENCE)["choices"][0]["message"]
        self.answer = (message.get("content") or message.get("reasoning") or "").strip()
        self.measured["answer"] = self.answer
        if not self.answer:
            raise Failed(f"the chat's answer is empty: {JOURNAL}")
        if REPLACEMENT in self.answer:
            raise Failed(
                "the chat's answer holds broken characters (U+FFFD): run playbooks/weights.yml to verify the weights"
            )
        if self.expect is not None and self.answer != self.expect.strip():
            raise Failed(f"the chat's answer is {self.answer!r} and not {self.expect.strip()!r}: {JOURNAL}")

    def streaming(self) -> None:
        """The same answer comes in pieces.

        On a GPU two runs may differ in a word even at temperature 0: the text has to be equal only where it is known.
        """
        content, reasoning, times, tokens = "", "", [], 0
        start = time.monotonic()
        for event in self.door.stream("/v1/chat/completions", self.question, ANSWER_PATIENCE):
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
            for choice in event["choices"]:
                piece = choice["delta"].get("content") or ""
                thought = choice["delta"].get("reasoning") or ""
                content, reasoning = content + piece, reasoning + thought
                if piece or thought:
                    times.append(time.monotonic())
        if len(times) < 2:
            raise Failed(f"the stream came in {len(times)} pieces: run playbooks/serve.yml to render the gateway anew")
        text = (content or reasoning).strip()
        if self.expect is not None and text != self.answer:
            raise Failed(f"the streamed answer is {text!r} and the chat's was {self.answer!r}: {JOURNAL}")
        spent = times[-1] - times[0] if tokens > 1 else 0.0
        self.measured |= {
            "tokens": tokens,
            "first_token_seconds": round(times[0] - start, 3),
            "tokens_per_second": round((tokens - 1) / spent, 2) if spent > 0 else None,
        }

    def wrong_key(self) -> None:
        """Nobody comes in with a key that is not ours."""
        good = self.door.key or ""
        wrong = good[:-1] + ("0" if good[-1] != "0" else "1")
        for name, key in (("a wrong key", wrong), ("no key", None)):
            status = self.door.get("/v1/models", key)[0]
            if status != 401:
                raise Failed(
                    f"the door answers {status} to {name}, not 401: run playbooks/serve.yml to render the gateway anew"
                )

    def acceptance(self) -> None:
        """The speculator drafts, and the model takes some of it."""
        wanted = self.measured["speculator"] = deployed_speculator(self.paths)
        if wanted == "none":
            return
        after = self.door.get("/metrics", self.door.key)[1]
        made, taken = (
            counters(after, name) - counters(self.metrics_before, name)
            for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
        )
        if made <= 0:
            raise Failed(
                f"speculator {wanted} is deployed and drafted nothing: mend `systemctl edit glm-vllm-head`, "
                "or run playbooks/serve.yml"
            )
        self.measured |= {"drafted": int(made), "accepted": int(taken), "acceptance": round(taken / made, 3)}
        if taken <= 0:
            raise Failed(f"speculator {wanted} drafted {made:.0f} tokens and none was accepted: {JOURNAL}")

    def ranks(self) -> None:
        """Both nodes run the same thing, and rank 1 did its share of the answers above."""
        own, before, after = state.own(self.paths), self.peer_before, self.ask_peer_afterwards()
        for answer in (before, after):
            if isinstance(answer, Exception):
                raise Failed(
                    f"the peer does not say how it is ({answer}): look at `systemctl status glm-vllm-watch` on it"
                )
        name = after["node"]
        for field, words in (
            ("release", "release"),
            ("config_sha256", "serve.yaml"),
            ("chat_template_sha256", "chat template"),
            ("environment", "environment"),
        ):
            if own[field] != after[field]:
                raise Failed(
                    f"{own['node']} has {words} {own[field]} and {name} {after[field]}: run site.yml for both nodes"
                )
        worked, carried = share(before, after)
        self.measured |= {"peer": name, "peer_cpu_seconds": round(worked, 4), "peer_fabric_bytes": carried}
        if worked <= 0:
            raise Failed(f"rank 1 on {name} did nothing for the answers: look at `journalctl -u glm-vllm-worker` there")
        if carried <= 0:
            raise Failed(
                f"no byte crossed the rails of {name} while the answers were made: run `glm-vllm fabric` on both nodes"
            )

    def ask_peer_afterwards(self) -> dict | Silent | Unusable:
        """The peer's document with the answers in it: what its watch tells can be some seconds old."""
        deadline = time.monotonic() + STATE_PATIENCE
        while True:
            after = self.ask_peer()
            if isinstance(after, Exception) or isinstance(self.peer_before, Exception):
                return after
            if min(share(self.peer_before, after)) > 0 or time.monotonic() > deadline:
                return after
            time.sleep(0.2)

    def ask_peer(self) -> dict | Silent | Unusable:
        """The peer's document, or why there is none."""
        try:
            return ask_peer(node_fabric.load(self.paths))
        except (Silent, Unusable) as error:
            return error


CHECKS = {
    "health": Probe.health,
    "key": Probe.key,
    "models": Probe.models,
    "one-token": Probe.one_token,
    "chat": Probe.chat,
    "streaming": Probe.streaming,
    "wrong-key": Probe.wrong_key,
    "acceptance": Probe.acceptance,
    "ranks": Probe.ranks,
}


def check_all(probe: Probe) -> list[dict]:
    """Run the checks up to the first failure; a list of `{"name", "ok", "message", "seconds"}`."""
    done = []
    for name, check in CHECKS.items():
        start, message = time.monotonic(), ""
        try:
            check(probe)
        except Failed as failure:
            message = str(failure)
        except (KeyError, IndexError, TypeError) as error:
            message = f"the answer lacks what an OpenAI client reads ({type(error).__name__} {error}): {JOURNAL}"
        seconds = round(time.monotonic() - start, 3)
        done.append({"name": name, "ok": not message, "message": message, "seconds": seconds})
        if message:
            break
    return done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`glm-vllm probe [--url URL] [--expect TEXT]`."""
    parser.add_argument("--url", default="http://127.0.0.1:8888", help="the endpoint (default: %(default)s)")
    parser.add_argument("--expect", help="the exact answer that the chat has to give")


def run(args: argparse.Namespace) -> int:
    """`glm-vllm probe`: exit 0 when every check passes, 1 at the first that does not."""
    probe = Probe(node_paths.current(), args)
    done = check_all(probe)
    last = done[-1]
    failed = "" if last["ok"] else f"{last['name']}: {last['message']}"
    message = failed or f"all {len(done)} checks passed"
    if args.json:
        skipped = list(CHECKS)[len(done) :]
        shown = {"checks": done, "not_run": skipped, "measured": probe.measured}
        print(json.dumps({"schema": 1, "ok": not failed, "message": message, **shown}))
    else:
        for check in done:
            print(f"{'ok  ' if check['ok'] else 'FAIL'} {check['name']:<10} {check['seconds']:8.3f} s")
        print("\n".join(f"{name}: {value}" for name, value in probe.measured.items()))
    if failed:
        print(f"glm-vllm probe: {message}", file=sys.stderr)
    return 1 if failed else 0
