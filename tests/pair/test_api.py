"""The API as clients of OpenAI and Anthropic see it, through the gateway."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import bed
import pair
import pytest


def events(endpoint: bed.Endpoint, path: str, **body: object) -> list[tuple[float, dict]]:
    """Server-sent events of a streamed answer with the second at which each came; `[DONE]` is asserted."""
    found, done = [], False
    with endpoint.post(path, json={"model": bed.MODEL, "stream": True, **body}, stream=True) as answer:
        answer.raise_for_status()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                found.append((time.monotonic(), json.loads(line.removeprefix(b"data: "))))
    assert done
    return found


MESSAGES = [{"role": "user", "content": pair.QUESTION}]


def test_chat(endpoint: bed.Endpoint) -> None:
    """Fails when the answer is another one, ends otherwise, or is counted wrongly."""
    reply = endpoint.chat(pair.QUESTION, temperature=0, max_tokens=64)
    assert reply["choices"][0]["message"]["content"].strip() == pair.ANSWER
    assert reply["choices"][0]["finish_reason"] == "stop"
    usage = reply["usage"]
    assert usage["prompt_tokens"] > 0 and 0 < usage["completion_tokens"] <= 64
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_max_tokens_cuts(endpoint: bed.Endpoint) -> None:
    """Fails when speculation hands out more tokens than were asked for."""
    for wanted in (1, 2, 3, 4):
        reply = endpoint.chat(pair.QUESTION, temperature=0, max_tokens=wanted)
        assert reply["usage"]["completion_tokens"] == wanted
        assert reply["choices"][0]["finish_reason"] == "length"


def test_streaming_comes_in_pieces_and_says_the_same(endpoint: bed.Endpoint) -> None:
    """Fails when the gateway buffers the stream, or the pieces do not make the answer."""
    pieces = events(
        endpoint,
        "/v1/chat/completions",
        messages=MESSAGES,
        temperature=0,
        max_tokens=64,
        stream_options={"include_usage": True},
    )
    spoken = [(at, choice["delta"].get("content")) for at, event in pieces for choice in event["choices"]]
    spoken = [(at, text) for at, text in spoken if text]
    assert "".join(text for _, text in spoken).strip() == pair.ANSWER
    assert len(spoken) >= 3  # two drafts a step: a piece holds three tokens at most
    assert spoken[-1][0] - spoken[0][0] > 0.01, "all pieces came at once"
    assert pieces[-1][1]["usage"]["completion_tokens"] > 0


def test_completions(endpoint: bed.Endpoint) -> None:
    """Fails when the plain completion endpoint is closed."""
    body = {"model": bed.MODEL, "prompt": "Two small", "max_tokens": 4, "temperature": 0}
    reply = endpoint.post("/v1/completions", json=body)
    assert reply.status_code == 200
    assert reply.json()["usage"]["completion_tokens"] == 4


def test_answers_side_by_side(converged: None) -> None:
    """Fails when one request's cache or drafts leak into another's."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: pair.answer(), range(8)))
    assert answers == [pair.ANSWER] * 8


def test_model_list(endpoint: bed.Endpoint) -> None:
    """Fails when the served name or the length is another than configured."""
    models = endpoint.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [(bed.MODEL, 2048)]


def test_unknown_model_is_refused(endpoint: bed.Endpoint) -> None:
    """Fails when the engine answers to any name."""
    reply = endpoint.post("/v1/chat/completions", json={"model": "another", "messages": MESSAGES})
    assert reply.status_code == 404
    assert "another" in reply.text


def test_prompt_longer_than_the_model_is_refused(endpoint: bed.Endpoint) -> None:
    """Fails when a request that is too long is cut silently, or takes the engine down."""
    reply = endpoint.post(
        "/v1/chat/completions",
        json={"model": bed.MODEL, "messages": [{"role": "user", "content": "word " * 4000}]},
    )
    assert reply.status_code == 400
    assert "2048" in reply.text
    assert pair.answer() == pair.ANSWER


# ---- the door -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer KEY"}, 200),
        ({"Authorization": "bearer KEY"}, 200),
        ({"x-api-key": "KEY"}, 200),
        ({}, 401),
        ({"Authorization": "Bearer " + "0" * 64}, 401),
        ({"Authorization": "KEY"}, 401),
        ({"Authorization": "Basic KEY"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
def test_keys(headers: dict[str, str], status: int) -> None:
    """Fails when a right key is refused or anything else opens the door."""
    headers = {name: value.replace("KEY", bed.api_key()) for name, value in headers.items()}
    with bed.Endpoint(key="") as endpoint:
        endpoint.headers.pop("Authorization")
        reply = endpoint.get("/v1/models", headers=headers)
    assert reply.status_code == status
    if status == 401:
        assert reply.headers["WWW-Authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"


def test_key_in_capitals_is_another_key() -> None:
    """Fails when nginx compares keys without regard to case."""
    with bed.Endpoint(key=bed.api_key().upper()) as endpoint:
        assert endpoint.get("/v1/models").status_code == 401


def test_health_and_counters_need_no_key() -> None:
    """Fails when a load balancer or Prometheus on the private network would need the key."""
    with bed.Endpoint(key="") as endpoint:
        endpoint.headers.pop("Authorization")
        assert endpoint.get("/health").status_code == 200
        assert "vllm:" in endpoint.get("/metrics").text


def test_messages_endpoint_takes_anthropic_clients(endpoint: bed.Endpoint) -> None:
    """Fails when `x-api-key` with /v1/messages, which Anthropic's clients use, is closed."""
    body = {"model": bed.MODEL, "max_tokens": 64, "temperature": 0, "messages": MESSAGES}
    reply = endpoint.post("/v1/messages", json=body)
    assert reply.status_code == 200
    assert reply.json()["type"] == "message"
    assert "".join(part.get("text", "") for part in reply.json()["content"]).strip() == pair.ANSWER


@pytest.mark.full
def test_responses_endpoint(endpoint: bed.Endpoint) -> None:
    """Fails when OpenAI's newer API is closed, or says another thing than the older."""
    body = {"model": bed.MODEL, "input": pair.QUESTION, "max_output_tokens": 64, "temperature": 0}
    reply = endpoint.post("/v1/responses", json=body)
    assert reply.status_code == 200
    spoken = [part["text"] for item in reply.json()["output"] if item["type"] == "message" for part in item["content"]]
    assert "".join(spoken).strip() == pair.ANSWER


# ---- parsers -----------------------------------------------------------------------------------------
TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "parameters": {"type": "object", "properties": {"unit": {"type": "string"}}, "required": ["unit"]},
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "measure"}}])
def test_forced_tool_call_has_the_shape_of_a_call(endpoint: bed.Endpoint, choice: object) -> None:
    """Fails when the tool parser is not switched on or grammar-guided decoding does not end.

    The tiny model knows nothing: the grammar spells the call, and with it no argument.
    """
    reply = endpoint.chat(pair.QUESTION, temperature=0, max_tokens=64, tools=[TOOL], tool_choice=choice)
    (call,) = reply["choices"][0]["message"]["tool_calls"]
    assert call["type"] == "function" and call["function"]["name"] == "measure"
    assert isinstance(json.loads(call["function"]["arguments"]), dict)


def test_tools_leave_a_plain_answer_alone(endpoint: bed.Endpoint) -> None:
    """Fails when tool_choice auto is refused, which it is without a tool parser, or invents a call."""
    reply = endpoint.chat(pair.QUESTION, temperature=0, max_tokens=64, tools=[TOOL], tool_choice="auto")
    message = reply["choices"][0]["message"]
    assert not message.get("tool_calls")
    assert message["content"].strip() == pair.ANSWER


def test_reasoning_is_parted_from_the_answer(endpoint: bed.Endpoint) -> None:
    """Fails when the reasoning parser is off: then the thought and its closing tag would stand in the answer.

    The template opens a thought, and the chain checkpoint ends it before it answers.
    """
    message = endpoint.chat(pair.QUESTION, temperature=0, max_tokens=64)["choices"][0]["message"]
    assert message["reasoning"].strip()
    assert "think>" not in message["reasoning"] + message["content"]
    assert message["content"].strip() == pair.ANSWER


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [({"choice": ["metre", "second"]}, r"metre|second"), ({"regex": "(metre|second)s{3}"}, r"(metre|second)sss")],
)
def test_answer_keeps_to_a_grammar(endpoint: bed.Endpoint, rule: dict, allowed: str) -> None:
    """Fails when structured output is not enforced while tokens are drafted, or does not end."""
    reply = endpoint.chat(pair.QUESTION, temperature=0, max_tokens=64, structured_outputs=rule)
    assert re.fullmatch(allowed, reply["choices"][0]["message"]["content"])
    assert reply["choices"][0]["finish_reason"] == "stop"
