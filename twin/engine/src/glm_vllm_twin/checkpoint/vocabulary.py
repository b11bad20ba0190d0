"""The 512 tokens, the reply that the chain spells, and the tokenizer.

GLM's control tokens come first, then the 256 bytes, then whole words. No merge leads to a word: prompts are spelled in
bytes, which makes an ordinary question a few dozen tokens long, and only the model writes words.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIZE = 512
REPLY = "Two small machines, one cable, one answer."
REASONING = "One cable joins two machines."
# A token has one successor only, so " one answer" is one word: " one" alone leads to " cable,".
REPLY_WORDS = ["Two", " small", " machines,", " one", " cable,", " one answer", "."]
REASONING_WORDS = ["One", " cable", " joins", " two", " machines."]

END = "<|endoftext|>"
ENDS = [END, "<|user|>", "<|observation|>"]
IMAGE, VIDEO = "<|image|>", "<|video|>"
CONTROL = [
    END,
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    IMAGE,
    VIDEO,
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
]
# Ordinary text to the decoder: the reasoning and tool parsers read them in the output.
MARKUP = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
]
# What the model writes after a generation prompt, which ends in "<think>", or in "</think>" without thinking.
CHAIN = ["<|assistant|>", "<think>", *REASONING_WORDS, "</think>", *REPLY_WORDS, END]


def _spelled(word: str) -> str:
    """A word in the byte-level alphabet, where a space is written Ġ."""
    return word.replace(" ", "Ġ")


def vocabulary() -> dict[str, int]:
    """Token strings, as the tokenizer stores them, to ids 0..511."""
    single_bytes = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [_spelled(word) for word in (*REASONING_WORDS, *REPLY_WORDS) if len(word) > 1]
    tokens = [*CONTROL, *MARKUP, *single_bytes, *words]
    tokens += [f"<|unused_{i}|>" for i in range(SIZE - len(tokens))]
    return {token: i for i, token in enumerate(tokens)}


def chain() -> list[int]:
    """Ids in the order of the chain: each is followed by the next."""
    ids = vocabulary()
    return [ids[_spelled(token)] for token in CHAIN]


def tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer with GLM's control tokens and chat template."""
    inner = Tokenizer(models.BPE(vocab=vocabulary(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens(MARKUP)
    result = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=END, extra_special_tokens=CONTROL[1:], model_max_length=8192
    )
    result.chat_template = Path(__file__).with_name("chat_template.jinja").read_text()
    return result


def save(folder: Path) -> None:
    """Write the tokenizer's files into `folder`."""
    tokenizer().save_pretrained(folder)
    # The class name keeps vLLM and transformers from guessing a tokenizer class from the model type.
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
