# SPDX-License-Identifier: Apache-2.0
"""Action `bundle`: complete and seal a bundle on the controller, or look whether one is whole.

    - bundle: {state: sealed, path: /srv/bundle, profile: gb10, locks: [uv.txt], weights: /srv/model, licence: none}
    - bundle: {state: checked, path: /srv/bundle, profile: gb10, locks: [uv.txt]}

Arguments: `locks`, names in files/locks; `weights`, a model folder with its manifest.json, or nothing. Returns
`document` (bundle.json), `files` and `bytes`. Sealed, it is looked through again: what was written is what is read.
Fails with one sentence that names the file.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

REPOSITORY = Path(__file__).resolve().parents[2]
load = runpy.run_path(str(Path(__file__).resolve().parents[1] / "controller/own_code.py"))["load"]


class ActionModule(ActionBase):
    """Runs on the controller alone."""

    _requires_connection = False
    _supports_check_mode = True
    _VALID_ARGS = frozenset(("state", "path", "profile", "locks", "weights", "licence"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what the bundle is."""
        result = super().run(tmp, task_vars)
        given, bundle = self._task.args, load("plugins/controller/bundle.py")
        top = Path(given["path"])
        locks = {name: REPOSITORY / "files/locks" / name for name in given["locks"]}
        changed = False
        try:
            if given["state"] == "sealed":
                changed = self._seal(bundle, top, given, locks)
            if given["state"] == "sealed" and self._task.check_mode:
                return result | {"changed": changed}
            document = bundle.check(top, given["profile"], locks)
        except bundle.Spoilt as error:
            raise AnsibleActionFail(str(error)) from None
        except OSError as error:
            raise AnsibleActionFail(
                f"{error.filename or top}: {error.strerror}; make room or correct the path."
            ) from None
        sizes = [(top / name).stat().st_size for name in bundle.listing(top)]
        return result | {"changed": changed, "document": document, "files": len(sizes), "bytes": sum(sizes)}

    def _seal(self, bundle: Any, top: Path, given: dict[str, Any], locks: dict[str, Path]) -> bool:
        """Write all but wheels/ and apt/; True when the sums are others than before."""
        weights = Path(given["weights"]) if given.get("weights") else None
        manifest = bundle.weights_of(weights) if weights else None
        if self._task.check_mode:
            return not (top / bundle.SUMS).exists()
        before = (top / bundle.SUMS).read_text() if (top / bundle.SUMS).exists() else ""
        (top / bundle.SUMS).unlink(missing_ok=True)  # a run that is broken off leaves no bundle that looks whole
        bundle.own_parts(top, REPOSITORY)
        document: dict[str, Any] = {"schema": 1, "profile": given["profile"], "weights": None}
        document["locks"] = {name: bundle.digest(file) for name, file in locks.items()}
        if weights:
            bundle.bring_weights(top, weights, manifest)
            document["weights"] = {key: manifest[key] for key in ("name", "revision")} | {"licence": given["licence"]}
        else:
            bundle.keep_only(top / "weights", None)
        bundle.write(top / bundle.DOCUMENT, json.dumps(document, indent=1, sort_keys=True) + "\n")
        bundle.seal(top)
        return before != (top / bundle.SUMS).read_text()
