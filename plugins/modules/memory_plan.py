#!/usr/bin/python
"""Ask a release what a node's memory would be used for, and refuse what does not fit."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: memory_plan
short_description: The KV cache bytes that fit, by a release's own glm-vllm plan
description:
  - Runs C(glm-vllm plan) with vLLM's options on standard input. Nothing is started and nothing is changed.
  - Fails with the plan's sentence, which names the variable to change, when it does not fit.
  - In check mode, where the release may not exist yet, the answer is what O(current) says.
options:
  command: {description: The release's C(glm-vllm)., type: path, required: true}
  options: {description: vLLM's options as they will stand in C(serve.yaml)., type: dict, required: true}
  speculator: {description: What drafts., type: str, required: true}
  drafter: {description: Folder of the drafter, empty without one., type: path, default: ""}
  utilisation: {description: Share of memory that vLLM may use., type: float, required: true}
  memory: {description: Bytes of memory of the smaller node., type: int, required: true}
  reserve: {description: Bytes to be left free., type: int, required: true}
  start_cost: {description: Bytes that API server and NCCL take., type: int, required: true}
  profile: {description: V(full) or V(safe)., type: str, required: true}
  current: {description: The C(serve.yaml) in force., type: path, default: /etc/glm-vllm/serve.yaml}
author: GLM-5.3-Flash on two Sparks
"""

EXAMPLES = r"""
- name: Does it fit?
  memory_plan:
    command: /opt/glm-vllm/releases/0123456789ab/venv/bin/glm-vllm
    options: {model: /m, max-model-len: 1000000, max-num-seqs: 4, max-num-batched-tokens: 4640, tensor-parallel-size: 2}
    speculator: mtp
    utilisation: 0.87
    memory: 130660032512
    reserve: 4294967296
    start_cost: 6442450944
    profile: full
  register: plan
"""

RETURN = r"""
kv_cache_memory_bytes: {description: Bytes of KV cache on each node., type: int, returned: when known}
foretold: {description: Whether the plan was read from the current serve.yaml., type: bool, returned: always}
plan: {description: The document of C(glm-vllm plan --json)., type: dict, returned: when the release exists}
"""

import json
import os
import re

from ansible.module_utils.basic import AnsibleModule


def in_force(path):
    """The KV cache bytes of a serve.yaml that our filter wrote (one key a line); None when it says none."""
    try:
        with open(path, encoding="utf-8") as file:
            found = re.search(r"^kv-cache-memory-bytes: (\d+)$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) if found else None


def main():
    module = AnsibleModule(
        argument_spec=dict(
            command=dict(type="path", required=True),
            options=dict(type="dict", required=True),
            speculator=dict(type="str", required=True),
            drafter=dict(type="path", default=""),
            utilisation=dict(type="float", required=True),
            memory=dict(type="int", required=True),
            reserve=dict(type="int", required=True),
            start_cost=dict(type="int", required=True),
            profile=dict(type="str", required=True),
            current=dict(type="path", default="/etc/glm-vllm/serve.yaml"),
        ),
        supports_check_mode=True,
    )
    p = module.params
    if module.check_mode and not os.path.exists(p["command"]):
        known = in_force(p["current"])
        module.exit_json(changed=False, foretold=True, **({} if known is None else {"kv_cache_memory_bytes": known}))
    arguments = [p["command"], "plan", "--json", "--config", "-", "--speculator", p["speculator"]]
    for name in ("utilisation", "memory", "reserve", "profile"):
        arguments += [f"--{name}", str(p[name])]
    arguments += ["--start-cost", str(p["start_cost"])] + (["--drafter", p["drafter"]] if p["drafter"] else [])
    code, out, err = module.run_command(arguments, data=json.dumps(p["options"]))
    try:
        plan = json.loads(out)
    except ValueError:
        module.fail_json(msg=f"{p['command']} plan ended with exit code {code} and no answer: {err.strip()[-2000:]}")
    if code != 0:
        module.fail_json(msg=f"The plan of memory does not hold: {plan['message']}.", plan=plan)
    module.exit_json(changed=False, foretold=False, kv_cache_memory_bytes=plan["kv_cache_memory_bytes"], plan=plan)


if __name__ == "__main__":
    main()
