# SPDX-License-Identifier: Apache-2.0
"""Serve one model folder to the peer for the time of a transfer."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_share
short_description: Starts and ends a read-only rsync daemon for one folder
description:
  - The daemon is a transient unit, listens on one address, admits one peer with a secret made for this transfer, and
    runs as nobody. With O(state=absent) unit, configuration and secret are gone.
options:
  state: {description: Whether the daemon runs., type: str, choices: [present, absent], required: true}
  path: {description: Folder to serve., type: path}
  address: {description: Address to listen on., type: str}
  peer: {description: Address to admit., type: str}
  port: {description: Port., type: int, default: 8730}
author: [glm-vllm]
"""

EXAMPLES = r"""
- name: Serve the model
  model_share: {state: present, path: /var/lib/glm-vllm/models/tiny/0123, address: 192.168.177.11, peer: 192.168.177.12}
"""

RETURN = r"""
secret: {description: Password of the transfer., type: str, returned: with state present}
"""

import os
import secrets
import shutil
import socket
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

UNIT = "glm-vllm-model-share.service"
FOLDER = Path("/run/glm-vllm-model-share")
CONFIG = """\
use chroot = no
reverse lookup = no
uid = nobody
gid = nogroup
[model]
path = {path}
read only = yes
list = no
hosts allow = {peer}
auth users = glm-vllm
secrets file = {secrets}
"""


def private(path: Path, text: str) -> None:
    """Write a file that only root can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def stop(module: AnsibleModule) -> bool:
    """End the daemon and remove its files; True when there was something to end."""
    code, _, _ = module.run_command(["systemctl", "--quiet", "is-active", UNIT])
    there = code == 0 or FOLDER.exists()
    if there and not module.check_mode:
        module.run_command(["systemctl", "stop", UNIT])
        shutil.rmtree(FOLDER, ignore_errors=True)
    return there


def start(module: AnsibleModule) -> str:
    """Start the daemon and wait until it listens; returns the secret."""
    address, port = module.params["address"], module.params["port"]
    secret = secrets.token_urlsafe(24)
    FOLDER.mkdir(mode=0o700)
    private(FOLDER / "secrets", f"glm-vllm:{secret}\n")
    private(
        FOLDER / "rsyncd.conf",
        CONFIG.format(path=module.params["path"], peer=module.params["peer"], secrets=FOLDER / "secrets"),
    )
    command = ["rsync", "--daemon", "--no-detach", f"--address={address}", f"--port={port}"]
    module.run_command(
        ["systemd-run", "--quiet", "--collect", f"--unit={UNIT}", "--property=RuntimeMaxSec=12h"]
        + [*command, f"--config={FOLDER / 'rsyncd.conf'}"],
        check_rc=True,
    )
    for _ in range(50):
        try:
            socket.create_connection((address, port), timeout=1).close()
            return secret
        except OSError:
            time.sleep(0.1)
    _, out, _ = module.run_command(["journalctl", "--no-pager", "--lines=3", "--output=cat", f"--unit={UNIT}"])
    stop(module)
    module.fail_json(msg=f"The rsync daemon for the transfer does not listen on {address} port {port}: {out.strip()}")
    return ""


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "required": True},
            "path": {"type": "path"},
            "address": {"type": "str"},
            "peer": {"type": "str"},
            "port": {"type": "int", "default": 8730},
        },
        required_if=[("state", "present", ("path", "address", "peer"))],
        supports_check_mode=True,
    )
    left = stop(module)  # also what a broken run left
    if module.params["state"] == "absent":
        module.exit_json(changed=left)
    module.exit_json(changed=True, secret="" if module.check_mode else start(module))


if __name__ == "__main__":
    main()
