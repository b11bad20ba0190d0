# SPDX-License-Identifier: Apache-2.0
"""Render vLLM's own --config file: the option set from the role's variables, and its YAML text.

vLLM reads the file before it knows its options: `enable-x: false` is dropped without a word. So an option that is
off is written as its own key (`no-enable-x: true`), and everything the file could lose or leak is refused here.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError

HEADER = (
    "# Managed by Ansible. Every key is one option of `vllm serve`; `glm-vllm check-config` proves that it arrived.\n"
)
KEY = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

UNIT = "the unit passes it to each node"
GATEWAY = "the engine listens on a Unix socket and the gateway owns the door: use glm_vllm_overlay_http and _api_port"
KEYS = "keys belong to the gateway: use glm_vllm_overlay_api_keys"
TOKEN = "the engine never goes to a hub and takes no token"
PAIR = "it follows from the inventory and glm_vllm_overlay_executor"
SPECULATOR = "the unit carries it: use glm_vllm_overlay_speculator"
MEMORY = "the unit carries it: use glm_vllm_overlay_gpu_memory_utilization"

# Options that this file never carries, and where each belongs instead.
OWNED_ELSEWHERE = {
    "host": GATEWAY,
    "port": GATEWAY,
    "uds": GATEWAY,
    "grpc": GATEWAY,
    "grpc-port": GATEWAY,
    "ssl-keyfile": GATEWAY,
    "ssl-certfile": GATEWAY,
    "ssl-ca-certs": GATEWAY,
    "api-key": KEYS,
    "hf-token": TOKEN,
    "node-rank": UNIT,
    "headless": UNIT,
    "config": UNIT,
    "gpu-memory-utilization": MEMORY,
    "device-memory-utilization": MEMORY,
    "speculative-config": SPECULATOR,
    "spec-method": SPECULATOR,
    "spec-model": SPECULATOR,
    "spec-tokens": SPECULATOR,
}
# Options that serve_config alone decides.
FROM_INVENTORY = (
    "model",
    "nnodes",
    "master-addr",
    "master-port",
    "tensor-parallel-size",
    "distributed-executor-backend",
)

# Options that no kernel depends on: where the ranks meet, how the weights are read, what the API makes of an answer.
SHAPELESS = (
    "chat-template",
    "default-chat-template-kwargs",
    "distributed-executor-backend",
    "enable-auto-tool-choice",
    "enable-prompt-tokens-details",
    "load-format",
    "master-addr",
    "master-port",
    "model-loader-extra-config",
    "nnodes",
    "override-generation-config",
    "reasoning-parser",
    "served-model-name",
    "tool-call-parser",
)


def plain(value: Any) -> Any:
    """The value as exact dict, list, str, int, float, bool or None, without Ansible's tagged and lazy types."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return str.__str__(value) if isinstance(value, str) else value


def refusal(key: str, value: Any) -> str | None:
    """Why this option can't stand in the file, as a sentence; None when it can."""
    if not KEY.fullmatch(key):
        return f"{key}: write the long name of a vLLM option, in lower case and with dashes, without dashes in front."
    if key in OWNED_ELSEWHERE:
        return f"{key}: take it out, {OWNED_ELSEWHERE[key]}."
    if value is False:
        if key.startswith("no-"):
            return f"{key}: false would be dropped by vLLM without a word; write {key.removeprefix('no-')}: true."
        return f"{key}: false would be dropped by vLLM without a word; write no-{key}: true."
    if value is None:
        return f"{key}: it has no value; give it one or leave the key out, vLLM would read the word None."
    if value in ("", [], {}):
        return f"{key}: it is empty; give it a value or leave the key out."
    if isinstance(value, str) and value.startswith("-"):
        return f"{key}: {value} begins with a dash, and vLLM would take it for an option."
    if isinstance(value, list) and any(isinstance(item, (bool, dict, list)) or item is None for item in value):
        return f"{key}: a list holds words and numbers only; write anything deeper as a dictionary."
    return None


def scalar(value: Any) -> str:
    """One value as YAML on one line; a dictionary becomes the JSON text that vLLM's option expects."""
    if isinstance(value, dict):
        value = json.dumps(value, separators=(",", ":"), sort_keys=True)
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def serve_yaml(options: dict[str, Any]) -> str:
    """YAML text of a vLLM --config file, keys sorted.

    options: {long name with dashes: str, number, true, list of words and numbers, or dictionary}.
    AnsibleFilterError, one sentence naming the key, for what vLLM would drop or what belongs elsewhere.
    """
    options = plain(options)
    for key, value in options.items():
        if problem := refusal(str(key), value):
            raise AnsibleFilterError(f"serve.yaml, {problem}")
    return HEADER + "".join(f"{key}: {scalar(options[key])}\n" for key in sorted(options))


def shaping(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `serve_config` on which it depends what the engine compiles."""
    found = {key: value for key, value in options.items() if key not in SHAPELESS}
    more = found.get("additional-config")
    if isinstance(more, dict):  # a direction that is taken out of weights compiles nothing
        found["additional-config"] = {key: value for key, value in more.items() if key != "ablation"}
    return found


def switch(name: str, on: bool) -> dict[str, bool]:
    """A boolean option, on or off, as the one key that says so."""
    return {name if on else f"no-{name}": True}


def opposites(key: str) -> set[str]:
    """Other spellings that switch the same option, so that the one merged last is the only one left."""
    base = key.removeprefix("no-")
    for prefix, inverse in (("enable-", "disable-"), ("disable-", "enable-")):
        if base.startswith(prefix):
            name = base.removeprefix(prefix)
            return {f"{no}{word}{name}" for no in ("", "no-") for word in (prefix, inverse)} - {key}
    return {base, f"no-{base}"} - {key}


def merge_extra(options: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """options with glm_vllm_overlay_extra_args merged last; AnsibleFilterError names a key that can't be in it."""
    merged = dict(options)
    for key, value in extra.items():
        problem = refusal(str(key), value)
        if key in FROM_INVENTORY:
            problem = f"{key}: take it out, {PAIR}."
        if problem:
            raise AnsibleFilterError(f"glm_vllm_overlay_extra_args, {problem}")
        for other in opposites(key):
            merged.pop(other, None)
        merged[key] = value
    return merged


def serve_config(
    serving: dict[str, Any],
    model: str,
    master_addr: str,
    nodes: int = 2,
    chat_template: str = "",
    ablation: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Every option that both nodes' engines share, for serve_yaml.

    serving: the glm_vllm_overlay_* variables. model: folder of the weights on the nodes. master_addr: the head's fabric
    address. nodes: how many, one rank each. chat_template: file on the nodes, "" for the checkpoint's own.
    ablation: the direction's file on the nodes and its sha256, None for no ablation.
    AnsibleFilterError names a variable that is missing and an extra argument that can't be taken.
    """
    serving = plain(serving)

    def wanted(name: str) -> Any:
        try:
            return serving[f"glm_vllm_overlay_{name}"]
        except KeyError:
            raise AnsibleFilterError(
                f"glm_vllm_overlay_{name} is not set; see the role's README for its default."
            ) from None

    options: dict[str, Any] = {
        "model": plain(model),
        "served-model-name": wanted("served_name"),
        "tensor-parallel-size": int(nodes),
        "distributed-executor-backend": wanted("executor"),
        "max-model-len": wanted("max_model_len"),
        "max-num-seqs": wanted("max_num_seqs"),
        "max-num-batched-tokens": wanted("max_num_batched_tokens"),
        "kv-cache-dtype": wanted("kv_cache_dtype"),
        "load-format": wanted("load_format"),
        "enable-prompt-tokens-details": True,
        "default-chat-template-kwargs": {"reasoning_effort": wanted("reasoning_effort")},
        "override-generation-config": {"max_new_tokens": wanted("default_max_tokens")},
        "limit-mm-per-prompt": wanted("limit_mm"),
        # Named although the checkpoint says it too: an engine without the overlay then refuses to start.
        "quantization": "exl3",
        "additional-config": {"exl3_backend": wanted("exl3_backend")},
        # The loader doesn't count the tensors of a quantised model by itself.
        "model-loader-extra-config": {"enable_weights_track": True},
    }
    # Ray finds its own nodes; nnodes beside it is an error in vLLM.
    if wanted("executor") == "mp":
        options |= {"nnodes": int(nodes), "master-addr": plain(master_addr), "master-port": wanted("master_port")}
    options |= switch("enable-prefix-caching", wanted("prefix_caching"))
    options |= switch("enable-flashinfer-autotune", wanted("flashinfer_autotune"))
    if wanted("enforce_eager"):
        options["enforce-eager"] = True
    if wanted("kv_cache_memory_bytes") != "auto":
        options["kv-cache-memory-bytes"] = wanted("kv_cache_memory_bytes")
    if wanted("tool_parser"):
        options |= {"tool-call-parser": wanted("tool_parser"), "enable-auto-tool-choice": True}
    if wanted("reasoning_parser"):
        options["reasoning-parser"] = wanted("reasoning_parser")
    if wanted("drafter_kv") == "split":
        options["additional-config"]["drafter_kv"] = "split"
    if ablation:
        layers, alpha = wanted("ablation_layers"), wanted("ablation_alpha")
        options["additional-config"]["ablation"] = {**plain(ablation), "layers": layers, "alpha": alpha}
    if chat_template:
        options["chat-template"] = plain(chat_template)
    if any(wanted("limit_mm").values()):
        options |= {
            "mm-processor-cache-gb": 1,
            "mm-processor-kwargs": {"max_image_tokens": 2048},
            "skip-mm-profiling": True,
        }
    return merge_extra(options, wanted("extra_args"))


class FilterModule:
    """Filters of the engine's configuration file."""

    def filters(self) -> dict[str, Any]:
        """Filter names and functions."""
        return {"serve_yaml": serve_yaml, "serve_config": serve_config, "shaping": shaping}
