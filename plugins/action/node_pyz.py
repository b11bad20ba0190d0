"""Action `node_pyz`: builds the node program as a zipapp on the controller and copies it to the node.

    - name: Install the node program for roles that run before a release exists
      node_pyz:
        dest: /usr/local/lib/glm-vllm/node.pyz

`dest` is required; `mode`, `owner` and `group` are the copy action's (default 0755, root, root). The same sources give
the same bytes, so that a second run changes nothing. Check and diff mode are the copy action's.
"""

from __future__ import annotations

import io
import os
import tempfile
import zipfile
from pathlib import Path

from ansible.plugins.action import ActionBase

SOURCES = Path(__file__).resolve().parents[2] / "files/overlay/src"
PACKAGE = "glm_vllm_overlay"
MAIN = "from glm_vllm_overlay.cli import main\n\nraise SystemExit(main())\n"
# The oldest time a zip can hold: the sources' own times differ from clone to clone.
EPOCH = (1980, 1, 1, 0, 0, 0)


def members(sources: Path) -> dict[str, bytes]:
    """What goes into the zipapp: the command and `node/`, which need nothing but Python."""
    package = sources / PACKAGE
    files = [package / "__init__.py", package / "cli.py", *sorted((package / "node").glob("*.py"))]
    content = {str(file.relative_to(sources)): file.read_bytes() for file in files}
    return content | {"__main__.py": MAIN.encode()}


def build(sources: Path = SOURCES) -> bytes:
    """The zipapp's bytes; equal sources give equal bytes (stored, so that no zlib version shows)."""
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(members(sources).items()):
            info = zipfile.ZipInfo(name, EPOCH)
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
    return buffer.getvalue()


class ActionModule(ActionBase):
    """Builds, then lets the copy action compare and transfer."""

    TRANSFERS_FILES = True
    _VALID_ARGS = frozenset(("dest", "mode", "owner", "group"))

    def run(self, tmp=None, task_vars=None):
        """Return the copy action's result."""
        super().run(tmp, task_vars)
        if not self._task.args.get("dest"):
            return {"failed": True, "msg": "node_pyz: dest is missing: give the path of the zipapp on the node"}
        descriptor, local = tempfile.mkstemp(prefix="node-", suffix=".pyz")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(build())
            task = self._task.copy()
            task.args = {"mode": "0755", "owner": "root", "group": "root"} | dict(self._task.args) | {"src": local}
            copy = self._shared_loader_obj.action_loader.get(
                "ansible.legacy.copy",
                task=task,
                connection=self._connection,
                play_context=self._play_context,
                loader=self._loader,
                templar=self._templar,
                shared_loader_obj=self._shared_loader_obj,
            )
            return copy.run(task_vars=task_vars)
        finally:
            os.unlink(local)
