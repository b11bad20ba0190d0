"""Where everything lives on a node. `GLM_ROOT` puts another folder before every path (tests)."""

from __future__ import annotations

import os
from pathlib import Path


class Paths:
    """All paths below one root folder."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)
        self.node_env = self.root / "etc/glm-vllm/node.env"
        self.fabric_json = self.root / "etc/glm-vllm/fabric.json"
        self.serve_yaml = self.root / "etc/glm-vllm/serve.yaml"
        self.chat_template = self.root / "etc/glm-vllm/chat_template.jinja"
        self.tls = self.root / "etc/glm-vllm/tls"
        self.weights = self.root / "etc/glm-vllm/weights.json"
        self.run = self.root / "run/glm-vllm"
        self.fabric_env = self.run / "fabric.env"
        self.transfer = self.root / "run/glm-vllm-model/progress.json"
        self.session = self.run / "session.json"
        self.socket = self.run / "api.sock"
        self.home = self.root / "var/lib/glm-vllm"
        self.deployment = self.home / "deployments/current/deployment.json"
        self.measurements = self.home / "fabric"
        self.incident = self.home / "watch/incident.json"
        self.memory_record = self.home / "watch/memory.json"
        self.releases = self.root / "opt/glm-vllm/releases"
        self.drop_caches = self.root / "usr/local/sbin/glm-vllm-drop-caches"
        self.device_helper = self.root / "usr/bin/nvidia-modprobe"
        self.proc = self.root / "proc"
        self.sys = self.root / "sys"
        self.net = self.sys / "class/net"

    def venv(self, release: str) -> Path:
        """The virtual environment of a release."""
        return self.releases / release / "venv"

    def release_manifest(self, release: str) -> Path:
        """What a release consists of, written last of all."""
        return self.releases / release / "manifest.json"


def current() -> Paths:
    """The paths of this machine, or those below `GLM_ROOT`."""
    return Paths(os.environ.get("GLM_ROOT") or "/")
