"""The tiny checkpoints: complete, small, the same bytes every time, and spelled for GLM's own parsers."""

import hashlib
import json

import pytest
from glm_vllm_twin import torchvision_ops

torchvision_ops.declare()

from glm_vllm_overlay import inspect  # noqa: E402
from glm_vllm_twin.checkpoint import build, vocabulary, weights  # noqa: E402

CALL = "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn</arg_value></tool_call>"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def tokenizer():
    return vocabulary.tokenizer()


@pytest.mark.parametrize("kind", build.KINDS)
def test_the_manifest_names_every_byte(kind, checkpoint):
    folder = checkpoint(kind)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["schema"], manifest["name"]) == (1, f"tiny-glm-5.3-flash-{kind}")
    assert len(bytes.fromhex(manifest["revision"])) == 20
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}
    assert {name: (len(b), hashlib.sha256(b).hexdigest()) for name, b in files.items()} == {
        name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()
    }
    assert sum(map(len, files.values())) < 20_000_000
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in folder.iterdir())


@pytest.mark.parametrize("kind", build.KINDS)
def test_the_experts_are_packed_like_the_real_ones(kind, checkpoint):
    """All of them, the MTP layer's too, so that the overlay's kernels would serve them as they are."""
    report = inspect.summarise(inspect.read_checkpoint(checkpoint(kind)), tp=2)
    assert (report["ok"], report["problems"], report["warnings"]) == (True, [], [])
    experts = {key: report["experts"][key] for key in ("layers", "per_layer", "bits", "codebook")}
    assert experts == {"layers": [1, 2, 3, 4, 5], "per_layer": [8], "bits": [4], "codebook": "mcg"}
    config = json.loads((checkpoint(kind) / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "exl3"


def test_a_second_build_is_the_same(checkpoint, tmp_path):
    build.build("chain", tmp_path / "again")
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (checkpoint("chain") / "manifest.json").read_bytes()


def test_a_filled_folder_is_refused(tmp_path, capsys):
    (tmp_path / "precious").touch()
    with pytest.raises(SystemExit) as stopped:
        build.main(["chain", str(tmp_path)])
    assert stopped.value.code == 2 and "not an empty folder" in capsys.readouterr().err


def test_a_folder_is_built_once_and_again_for_another_recipe(tmp_path, monkeypatch):
    writes = []
    monkeypatch.setattr(weights, "write", lambda kind, folder: writes.append(kind) or (folder / "x").touch())
    for recipe in (1, 1, 2):
        monkeypatch.setattr(build, "RECIPE", recipe)
        assert build.main(["chain", str(tmp_path / "m")]) == 0
        assert build.found(tmp_path / "m") == (build.name("chain"), build.revision("chain"))
    assert writes == ["chain", "chain"]


def test_a_checkpoint_of_another_kind_is_refused(checkpoint, capsys):
    with pytest.raises(SystemExit):
        build.main(["random", str(checkpoint("chain"))])
    assert "holds tiny-glm-5.3-flash-chain" in capsys.readouterr().err


def test_the_chain_spells_the_reply_and_ends(tokenizer):
    successors = weights.successors()
    token, text = tokenizer.convert_tokens_to_ids("<think>"), []
    while token != tokenizer.eos_token_id:
        token = int(successors[token])
        text.append(token)
    assert tokenizer.decode(text[:-1]) == f"{vocabulary.REASONING}</think>{vocabulary.REPLY}"
    assert sorted(successors.tolist()) == list(range(vocabulary.SIZE))


@pytest.mark.parametrize("text", ["Grüße, 世界 🚀\n", "one cable<|user|>", CALL, "a  b\tc"])
def test_any_text_survives_the_tokenizer(text, tokenizer):
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_the_template_is_shaped_like_glm(tokenizer):
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": "", "reasoning_content": "Ask.", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=TOOLS, tokenize=False, add_generation_prompt=True, reasoning_effort="max"
    )
    assert text.startswith("[gMASK]<sop><|system|>\nReasoning Effort: Max")
    assert text.endswith(
        f"<|system|>\nBe brief.<|user|>\nHi<|assistant|><think>Ask.</think>{CALL}<|observation|>\nrain"
        "<|assistant|><think>"
    )


def test_vllms_parsers_read_the_output(tokenizer):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], model="m", tools=TOOLS)
    reasoning = ReasoningParserManager.get_reasoning_parser("glm45")(tokenizer)
    thought, rest = reasoning.extract_reasoning(f"{vocabulary.REASONING}</think>{CALL}", request)
    assert (thought, rest) == (vocabulary.REASONING, CALL)
    called = ToolParserManager.get_tool_parser("glm47")(tokenizer, request.tools).extract_tool_calls(rest, request)
    assert [(c.function.name, json.loads(c.function.arguments)) for c in called.tool_calls] == [
        ("weather", {"city": "Bonn"})
    ]
