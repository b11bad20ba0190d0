#!/usr/bin/python
"""Wait for the engine for a while, and tell a slow start from one that fails again and again."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: engine_wait
short_description: Wait until the engine answers, or until it is plain that it won't
description:
  - Waits until the unit is active and C(/health) on the engine's Unix socket answers 200, for at most O(seconds). An
    engine that is on its way out may still answer.
  - O(restarts) or more restarts of the unit since it was started by hand mean that waiting is of no use.
options:
  unit: {description: The engine's systemd unit., type: str, required: true}
  socket: {description: The engine's Unix socket., type: path, default: /run/glm-vllm/api.sock}
  seconds: {description: How long one call waits., type: int, default: 15}
  restarts: {description: How many failed starts are enough., type: int, default: 4}
author: GLM-5.3-Flash on two Sparks
"""

EXAMPLES = r"""
- name: Wait until it serves
  engine_wait:
    unit: glm-vllm-head.service
  register: answer
  until: answer.serving or answer.hopeless
  retries: 40
"""

RETURN = r"""
serving: {description: Whether the unit is active and /health answered 200., type: bool, returned: always}
hopeless: {description: Whether the unit failed too often or was stopped., type: bool, returned: always}
last: {description: The unit's last journal lines., type: list, elements: str, returned: when not serving}
"""

import http.client
import socket
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path, timeout):
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def healthy(path):
    """Whether GET /health over the socket answers 200 within five seconds."""
    connection = UnixConnection(path, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def unit_state(unit):
    """(active state, number of automatic restarts, whether a start or stop is queued) as systemd has them."""
    said = subprocess.run(
        ["systemctl", "show", "--property=ActiveState,NRestarts,Job", unit],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    properties = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    return properties.get("ActiveState", ""), int(properties.get("NRestarts") or 0), bool(properties.get("Job"))


def is_hopeless(active, restarts, queued, enough):
    """Whether waiting is of no use. A unit that waits for another one, as for Ray behind its gate, is inactive too."""
    return restarts >= enough or (active in ("inactive", "failed") and not queued)


def main():
    module = AnsibleModule(
        argument_spec=dict(
            unit=dict(type="str", required=True),
            socket=dict(type="path", default="/run/glm-vllm/api.sock"),
            seconds=dict(type="int", default=15),
            restarts=dict(type="int", default=4),
        ),
        supports_check_mode=True,
    )
    p = module.params
    end = time.monotonic() + p["seconds"]
    while True:
        active, restarts, queued = unit_state(p["unit"])
        if active == "active" and healthy(p["socket"]):
            module.exit_json(changed=False, serving=True, hopeless=False)
        hopeless = is_hopeless(active, restarts, queued, p["restarts"])
        if hopeless or module.check_mode or time.monotonic() >= end:
            break
        time.sleep(1)
    last = subprocess.run(
        ["journalctl", "--unit", p["unit"], "--lines=12", "--output=cat", "--no-pager"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.splitlines()
    module.exit_json(changed=False, serving=False, hopeless=hopeless, active=active, restarts=restarts, last=last)


if __name__ == "__main__":
    main()
