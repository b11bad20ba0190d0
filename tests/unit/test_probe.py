"""`glm-vllm probe` against a stand-in endpoint: what is broken makes its own check fail, and no earlier one."""

from __future__ import annotations

import copy
import http.server
import json
import threading
import time

import pytest
from glm_vllm_overlay import cli
from glm_vllm_overlay.node import probe
from glm_vllm_overlay.node.errors import Unusable
from glm_vllm_overlay.node.keys import Store, take
from glm_vllm_overlay.node.paths import Paths
from glm_vllm_overlay.node.peer import Silent

KEY = "ab" * 32
ANSWER = "two machines answer as one"
NODE = {
    "node": "spark-a",
    "release": "r1",
    "config_sha256": "c1",
    "chat_template_sha256": None,
    "environment": {"GLM_SPECULATOR": "mtp", "GLM_GPU_MEMORY_UTILIZATION": "0.87", "ABLIT": "0"},
    "rank": {"cpu_seconds": 10.0},
    "fabric": {"rails": [{"rx_bytes": 1000, "tx_bytes": 1000}]},
}


class Endpoint(http.server.BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint as a healthy pair shows it; `broken` says what is wrong with it."""

    protocol_version = "HTTP/1.1"
    broken: dict = {}
    drafted = 0

    def reply(self, status: int, body: dict | str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refused(self) -> bool:
        """Whether the gateway says no."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.broken.get("closed") or (given != KEY and not self.broken.get("open")):
            self.reply(401, {"error": {"message": "No valid API key"}})
            return True
        return False

    def do_GET(self) -> None:
        cls = type(self)
        if self.path == "/health":
            status = self.broken.get("health", 200)
            self.reply(status, {"error": {"message": "The engine is not ready"}} if status != 200 else "")
        elif self.path == "/metrics":
            taken = cls.drafted * self.broken.get("taken", 0.75)
            lines = [
                "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.",
                f'vllm:spec_decode_num_draft_tokens_total{{model_name="m"}} {cls.drafted}.0',
                'vllm:spec_decode_num_draft_tokens_created{model_name="m"} 1.7e9',
                f'vllm:spec_decode_num_accepted_tokens_total{{model_name="m"}} {taken}',
                'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 99.0',
            ]
            self.reply(200, "\n".join(lines) + "\n")
        elif not self.refused():
            self.reply(200, {"data": [{"id": self.broken.get("name", "glm")}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refused():
            return
        if self.path == "/v1/completions":
            time.sleep(self.broken.get("hang", 0))
            if self.broken.get("dead"):
                self.reply(500, {"error": {"message": "EngineCore died"}})
                return
            self.reply(200, {"usage": {"completion_tokens": self.broken.get("tokens", 1)}})
            return
        type(self).drafted += self.broken.get("drafts", 20)
        text = self.broken.get("text", ANSWER)
        if not body.get("stream"):
            message = self.broken.get("message", {"content": text})
            self.reply(200, {"choices": [{"message": message}]} if message else {"choices": []})
            return
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        text = self.broken.get("streamed", text)
        pieces = [text] if self.broken.get("buffered") else text.split(" ")
        for number, piece in enumerate(pieces):
            event = {"choices": [{"delta": {"content": (" " if number else "") + piece}}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            time.sleep(0.01)
        if self.broken.get("stream_error"):
            self.wfile.write(b'data: {"error": {"message": "EngineCore died"}}\n\n')
        self.wfile.write(b'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\ndata: [DONE]\n\n')
        self.close_connection = True

    def log_message(self, *args) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url():
    """The endpoint's address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def pair(tmp_path, monkeypatch, url):
    """A healthy pair in `tmp_path`; returns its two nodes' documents, which a test may change."""
    monkeypatch.setenv("GLM_ROOT", str(tmp_path))
    take(Store(Paths(tmp_path)), "default", KEY)
    (tmp_path / "etc/glm-vllm/serve.yaml").write_text("served-model-name: glm\n")
    units = tmp_path / "var/lib/glm-vllm/deployments/current/units"
    units.mkdir(parents=True)
    (units / "glm-vllm-head.service").write_text("[Service]\nEnvironment=A=1 GLM_SPECULATOR=mtp ABLIT=0\n")
    monkeypatch.setattr(Endpoint, "broken", {})
    monkeypatch.setattr(Endpoint, "drafted", 100)
    monkeypatch.setattr(probe, "TOKEN_PATIENCE", 0.5)
    monkeypatch.setattr(probe, "STATE_PATIENCE", 0.5)
    nodes = {"own": copy.deepcopy(NODE), "peer": copy.deepcopy(NODE) | {"node": "spark-b"}, "cpu": 1.5, "bytes": 500}
    nodes["old"] = 0

    def ask_peer(fabric):
        if isinstance(nodes["peer"], Exception):
            raise nodes["peer"]
        asked = copy.deepcopy(nodes["peer"])
        nodes["old"] -= 1
        if nodes["old"] > 0:
            return asked
        nodes["peer"]["rank"]["cpu_seconds"] += nodes["cpu"]
        nodes["peer"]["fabric"]["rails"][0]["rx_bytes"] += nodes["bytes"]
        return asked

    monkeypatch.setattr(probe, "ask_peer", ask_peer)
    monkeypatch.setattr(probe.node_fabric, "load", lambda paths: None)
    monkeypatch.setattr(probe.state, "own", lambda paths: nodes["own"])
    return nodes


@pytest.fixture
def call(pair, url, capsys):
    """Run the probe with --json; returns (exit code, document)."""

    def run(*words):
        code = cli.main(["probe", "--json", "--url", url, "--expect", ANSWER, *words])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_healthy_pair_passes(call):
    """All checks in order, with what was measured."""
    code, document = call()
    assert code == 0 and document["ok"] and document["schema"] == 1 and document["not_run"] == []
    assert [check["name"] for check in document["checks"]] == list(probe.CHECKS)
    measured = document["measured"]
    assert measured["answer"] == ANSWER and measured["speculator"] == "mtp"
    assert (measured["drafted"], measured["accepted"], measured["acceptance"]) == (40, 30, 0.75)
    assert 1 < measured["tokens_per_second"] <= 200 and measured["tokens"] == 9
    assert measured["peer_cpu_seconds"] == 1.5 and measured["peer_fabric_bytes"] == 500


def release(pair):
    pair["peer"]["release"] = "r2"


def configuration(pair):
    pair["peer"]["config_sha256"] = "c2"


def chat_template(pair):
    pair["peer"]["chat_template_sha256"] = "t2"


def environment(pair):
    pair["peer"]["environment"] = pair["own"]["environment"] | {"GLM_GPU_MEMORY_UTILIZATION": "0.5"}


def silent(pair):
    pair["peer"] = Silent("192.0.2.2 port 8890: connection refused")


def no_fabric(pair):
    pair["peer"] = Unusable("fabric.json does not exist")


def test_a_state_from_before_the_answers_is_asked_again(call, pair):
    """The peer's watch looks once a second: on a fast machine all answers can be younger than what it tells."""
    pair["old"] = 3
    code, document = call()
    assert code == 0 and document["measured"]["peer_cpu_seconds"] == 1.5


def idle(pair):
    pair["cpu"] = 0


def no_bytes(pair):
    pair["bytes"] = 0


# What is broken, the check that has to say so, words of its sentence.
BROKEN = [
    ({"health": 503}, None, "health", "The engine is not ready"),
    ({"health": 500}, None, "health", "answers 500"),
    ({"closed": True}, None, "key", "refuses a key"),
    ({"name": "other"}, None, "models", "serves other and not glm"),
    ({"dead": True}, None, "one-token", "EngineCore died"),
    ({"hang": 2}, None, "one-token", "not answered within"),
    ({"tokens": 2}, None, "one-token", "2 came"),
    ({"message": {"content": None}}, None, "chat", "empty"),
    ({"message": {"content": " \n"}}, None, "chat", "empty"),
    ({"message": {"content": "a\ufffdb"}}, None, "chat", "U+FFFD"),
    ({"text": "something else"}, None, "chat", "something else"),
    ({"message": {}}, None, "chat", "OpenAI client"),
    ({"buffered": True}, None, "streaming", "came in 1 pieces"),
    ({"streamed": "two other words"}, None, "streaming", "two other words"),
    ({"stream_error": True}, None, "streaming", "EngineCore died"),
    ({"open": True}, None, "wrong-key", "200 to a wrong key"),
    ({"drafts": 0}, None, "acceptance", "speculator mtp is deployed and drafted nothing"),
    ({"taken": 0}, None, "acceptance", "none was accepted"),
    ({}, release, "ranks", "has release r1 and spark-b r2"),
    ({}, configuration, "ranks", "serve.yaml"),
    ({}, chat_template, "ranks", "has chat template None and spark-b t2"),
    ({}, environment, "ranks", "0.5"),
    ({}, silent, "ranks", "connection refused"),
    ({}, no_fabric, "ranks", "fabric.json"),
    ({}, idle, "ranks", "did nothing"),
    ({}, no_bytes, "ranks", "no byte crossed"),
]


@pytest.mark.parametrize(("broken", "change", "check", "words"), BROKEN)
def test_what_is_broken_is_what_is_named(call, pair, monkeypatch, broken, change, check, words):
    """The check at fault fails with its sentence, all before it passed, none after it ran."""
    monkeypatch.setattr(Endpoint, "broken", broken)
    if change:
        change(pair)
    code, document = call()
    names = list(probe.CHECKS)
    assert code == 1 and not document["ok"]
    assert [entry["name"] for entry in document["checks"]] == names[: names.index(check) + 1]
    assert [entry["ok"] for entry in document["checks"]] == [True] * names.index(check) + [False]
    assert document["not_run"] == names[names.index(check) + 1 :]
    assert document["message"].startswith(f"{check}: ") and words in document["message"]


def test_an_emptied_key_store(call, pair, tmp_path):
    """Says how to make a key."""
    store = Store(Paths(tmp_path))
    store.save([])
    code, document = call()
    assert code == 1 and document["message"].startswith("key: ") and "glm-vllm key new" in document["message"]


def test_nobody_listens(call, pair, capsys):
    """A gateway that is down is not a traceback."""
    code, document = call("--url", "http://127.0.0.1:9")
    assert code == 1 and document["message"].startswith("health: ") and "systemctl status nginx" in document["message"]


def test_the_deployment_says_what_is_wanted(call, pair, monkeypatch, tmp_path):
    """A speculator that was edited away is missed; one that was never deployed is not."""
    pair["own"]["environment"] = pair["peer"]["environment"] = NODE["environment"] | {"GLM_SPECULATOR": "none"}
    monkeypatch.setattr(Endpoint, "broken", {"drafts": 0})
    assert "acceptance: speculator mtp is deployed and drafted nothing" in call()[1]["message"]
    unit = tmp_path / "var/lib/glm-vllm/deployments/current/units/glm-vllm-head.service"
    unit.write_text("[Service]\nEnvironment=GLM_SPECULATOR=none\n")
    assert call()[0] == 0
    unit.unlink()
    assert "names no speculator" in call()[1]["message"]


def test_without_a_known_answer_the_text_may_differ(pair, url, capsys, monkeypatch):
    """On a GPU two runs at temperature 0 may differ in a word: that is no failure."""
    monkeypatch.setattr(Endpoint, "broken", {"streamed": "two others"})
    assert cli.main(["probe", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out and "acceptance: 0.75" in out


def test_a_thinking_answer_counts(pair, url, capsys, monkeypatch):
    """A model that is still thinking after 64 tokens has answered."""
    monkeypatch.setattr(Endpoint, "broken", {"message": {"content": None, "reasoning": "Well,"}})
    assert cli.main(["probe", "--url", url]) == 0


def test_the_key_is_never_shown(call, pair, capsys, monkeypatch):
    """Whatever fails, no output holds the key."""
    for broken in ({}, {"closed": True}, {"open": True}, {"dead": True}):
        monkeypatch.setattr(Endpoint, "broken", broken)
        assert KEY not in json.dumps(call()[1])


def test_a_bad_url(call):
    """Bad usage is exit code 2."""
    assert call("--url", "127.0.0.1:8888")[0] == 2
