"""The web server in front of the engine, as seen from the commands that change what it reads."""

from __future__ import annotations

import subprocess


def reload_nginx() -> str:
    """Make a running nginx read its files again; returns "" or, in one sentence, why it did not."""
    done = subprocess.run(["systemctl", "reload", "nginx.service"], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"the change is stored, but nginx was not reloaded ({done.stderr.strip()}): run `nginx -t`"
    return ""
