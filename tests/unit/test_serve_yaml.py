# SPDX-License-Identifier: Apache-2.0
"""serve.yaml: what each variable becomes, and what the file never carries."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible.errors import AnsibleFilterError

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("serve_yaml", ROOT / "plugins/filter/serve_yaml.py")
serve_yaml = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(serve_yaml)

DEFAULTS = yaml.safe_load((ROOT / "roles/glm-vllm-overlay/defaults/main.yml").read_text(encoding="utf-8"))
PLACE = {"model": "/var/lib/glm-vllm/models/target/rev", "master_addr": "192.168.177.11"}


def config(**changes):
    """serve_config for the gb10 defaults with some variables changed."""
    serving = DEFAULTS | {f"glm_vllm_overlay_{name}": value for name, value in changes.items()}
    return serve_yaml.serve_config(serving, **PLACE)


def test_gb10_is_rendered_exactly():
    """The file that two Sparks get, key by key."""
    assert serve_yaml.serve_yaml(config()) == serve_yaml.HEADER + (
        'additional-config: \'{"drafter_kv":"split","exl3_backend":"fused"}\'\n'
        'default-chat-template-kwargs: \'{"reasoning_effort":"high"}\'\n'
        "distributed-executor-backend: mp\n"
        "enable-auto-tool-choice: true\n"
        "enable-prefix-caching: true\n"
        "enable-prompt-tokens-details: true\n"
        "kv-cache-dtype: fp8\n"
        'limit-mm-per-prompt: \'{"image":48,"video":1}\'\n'
        "load-format: auto\n"
        "master-addr: 192.168.177.11\n"
        "master-port: 29521\n"
        "max-model-len: 1000000\n"
        "max-num-batched-tokens: 4640\n"
        "max-num-seqs: 4\n"
        "mm-processor-cache-gb: 1\n"
        "mm-processor-kwargs: '{\"max_image_tokens\":2048}'\n"
        "model: /var/lib/glm-vllm/models/target/rev\n"
        "model-loader-extra-config: '{\"enable_weights_track\":true}'\n"
        "nnodes: 2\n"
        "no-enable-flashinfer-autotune: true\n"
        "override-generation-config: '{\"max_new_tokens\":65536}'\n"
        "quantization: exl3\n"
        "reasoning-parser: glm45\n"
        "served-model-name: GLM-5.3-Flash-EXL3\n"
        "skip-mm-profiling: true\n"
        "tensor-parallel-size: 2\n"
        "tool-call-parser: glm47\n"
    )


def test_order_of_the_input_does_not_matter():
    """Two controllers with differently ordered dictionaries write the same bytes."""
    options = config()
    assert serve_yaml.serve_yaml(dict(reversed(options.items()))) == serve_yaml.serve_yaml(options)


def test_ray_names_no_nodes():
    """vLLM refuses nnodes beside Ray."""
    options = config(executor="ray")
    assert options["distributed-executor-backend"] == "ray"
    assert not {"nnodes", "master-addr", "master-port"} & set(options)


@pytest.mark.parametrize(
    ("change", "present", "absent"),
    [
        ({"prefix_caching": False}, {"no-enable-prefix-caching": True}, "enable-prefix-caching"),
        ({"flashinfer_autotune": True}, {"enable-flashinfer-autotune": True}, "no-enable-flashinfer-autotune"),
        ({"enforce_eager": True}, {"enforce-eager": True}, "no-enforce-eager"),
        ({"kv_cache_memory_bytes": 11811160064}, {"kv-cache-memory-bytes": 11811160064}, "no-"),
        ({"tool_parser": ""}, {}, "enable-auto-tool-choice"),
        ({"reasoning_parser": ""}, {}, "reasoning-parser"),
        (
            {"limit_mm": {"image": 0, "video": 0}},
            {"limit-mm-per-prompt": {"image": 0, "video": 0}},
            "skip-mm-profiling",
        ),
        ({"reasoning_effort": "low"}, {"default-chat-template-kwargs": {"reasoning_effort": "low"}}, "no-"),
        ({"default_max_tokens": 7}, {"override-generation-config": {"max_new_tokens": 7}}, "no-"),
    ],
)
def test_each_variable_is_its_option(change, present, absent):
    """One variable changed changes exactly the option that it stands for."""
    options = config(**change)
    assert present.items() <= options.items()
    assert absent not in options


def test_extra_args_come_last_and_replace_their_opposite():
    """The user's word stands alone, in whichever spelling ours was."""
    options = config(extra_args={"max-logprobs": 20, "no-enable-prefix-caching": True, "max-num-seqs": 2})
    assert options["max-logprobs"] == 20 and options["max-num-seqs"] == 2
    assert "no-enable-prefix-caching" in options and "enable-prefix-caching" not in options
    assert "no-enable-flashinfer-autotune" not in config(extra_args={"enable-flashinfer-autotune": True})
    assert "enable-prefix-caching" not in config(extra_args={"disable-prefix-caching": True})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("enable-prefix-caching", False, "write no-enable-prefix-caching: true"),
        ("no-enable-prefix-caching", False, "write enable-prefix-caching: true"),
        ("max-logprobs", None, "no value"),
        ("max-logprobs", "", "empty"),
        ("middleware", [], "empty"),
        ("middleware", [{"a": 1}], "words and numbers"),
        ("max_logprobs", 20, "with dashes"),
        ("--max-logprobs", 20, "without dashes in front"),
        ("api-key", "secret", "glm_vllm_overlay_api_keys"),
        ("hf-token", "secret", "takes no token"),
        ("host", "0.0.0.0", "gateway"),
        ("port", 8000, "gateway"),
        ("uds", "/tmp/x", "gateway"),
        ("grpc", True, "gateway"),
        ("grpc-port", 50051, "gateway"),
        ("node-rank", 1, "unit"),
        ("headless", True, "unit"),
        ("speculative-config", {"method": "mtp"}, "glm_vllm_overlay_speculator"),
        ("gpu-memory-utilization", 0.9, "glm_vllm_overlay_gpu_memory_utilization"),
        ("nnodes", 3, "inventory"),
        ("model", "/other", "inventory"),
        ("chat-template", "--x", "begins with a dash"),
    ],
)
def test_extra_args_refuses(key, value, says):
    """One sentence that names the variable and the key, and never the value of a secret."""
    with pytest.raises(AnsibleFilterError) as caught:
        config(extra_args={key: value})
    sentence = str(caught.value)
    assert sentence.startswith(f"glm_vllm_overlay_extra_args, {key}: ") and says in sentence
    assert "secret" not in sentence


def test_nothing_unsaid_gets_past_the_renderer():
    """serve_yaml refuses too: it is the last hand on the file."""
    for options in ({"enable-x": False}, {"x": None}, {"api-key": "k"}, {"port": 1}):
        with pytest.raises(AnsibleFilterError, match=next(iter(options))):
            serve_yaml.serve_yaml(options)


def test_a_missing_variable_is_named():
    """A typo in a role's variable is one sentence, not a traceback."""
    with pytest.raises(AnsibleFilterError, match="glm_vllm_overlay_max_num_seqs is not set"):
        serve_yaml.serve_config({k: v for k, v in DEFAULTS.items() if k != "glm_vllm_overlay_max_num_seqs"}, **PLACE)


def test_what_shapes_no_kernel_is_no_part_of_the_shape():
    """A change of these costs no rehearsal; a change of any other does."""
    before, shaping = config(), serve_yaml.shaping
    after = config(served_name="x", reasoning_effort="low", tool_parser="", executor="ray", default_max_tokens=9)
    assert before != after and shaping(before) == shaping(after)
    for change in ({"max_num_seqs": 9}, {"max_num_batched_tokens": 8192}, {"kv_cache_dtype": "auto"}, {"limit_mm": {}}):
        assert shaping(config(**change)) != shaping(before), change
    assert shaping(config(extra_args={"block-size": 64})) != shaping(before)
    ablated = before | {"additional-config": {**before["additional-config"], "ablation": {"alpha": 0.5}}}
    assert ablated != before and shaping(ablated) == shaping(before)
    assert set(serve_yaml.SHAPELESS) <= {*before, "chat-template"}


def test_values_survive_yaml():
    """What vLLM's YAML reader sees is what was meant, whatever the words look like."""
    options = {
        "a": "yes",
        "b": "1e3",
        "c": "null",
        "d": 0.87,
        "e": {"k": False, "t": "ü: #"},
        "f": ["x", 1],
        "g": "a: b #c",
    }
    read = yaml.safe_load(serve_yaml.serve_yaml(options))
    assert {**read, "e": json.loads(read["e"])} == options


def test_through_ansible_itself():
    """Ansible's own tagged and lazy types render like plain ones."""
    expression = (
        "{{ dict(names | zip(query('ansible.builtin.vars', *names))) | "
        "serve_config(model='/m', master_addr='192.0.2.1') | serve_yaml }}"
    )
    run = subprocess.run(
        [Path(sys.executable).with_name("ansible"), "localhost", "-c", "local", "-i", "localhost,", "-o"]
        + ["-e", "@roles/glm-vllm-overlay/defaults/main.yml", "-e", "{glm_vllm_overlay_extra_args: {max-logprobs: 20}}"]
        + ["-e", json.dumps({"names": "{{ query('ansible.builtin.varnames', '^glm_vllm_overlay_') }}"})]
        + ["-m", "ansible.builtin.debug", "-a", f'msg="{expression}"'],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_STDOUT_CALLBACK": "oneline"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    text = json.loads(run.stdout.partition("=>")[2])["msg"]
    expected = DEFAULTS | {"glm_vllm_overlay_extra_args": {"max-logprobs": 20}}
    assert text == serve_yaml.serve_yaml(serve_yaml.serve_config(expected, model="/m", master_addr="192.0.2.1"))
