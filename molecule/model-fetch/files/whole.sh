#!/bin/bash
# whole.sh: every byte of the model is there and flagged, with no help from the role's own code.
set -euo pipefail
cd /var/lib/glm-vllm/models/tiny/00112233445566778899aabbccddeeff00112233
say() { echo "$*" >&2; exit 1; }
python3 - <<'P'
import hashlib, json, pathlib
manifest = json.loads(pathlib.Path("manifest.json").read_text())
for name, entry in manifest["files"].items():
    data = pathlib.Path(name).read_bytes()
    assert len(data) == entry["size"] and hashlib.sha256(data).hexdigest() == entry["sha256"], f"{name} is wrong"
flag = json.loads(pathlib.Path(".verified.json").read_text())
assert flag["manifest_sha256"] == hashlib.sha256(pathlib.Path("manifest.json").read_bytes()).hexdigest()
found = {str(p) for p in pathlib.Path(".").rglob("*") if p.is_file() and not p.name.startswith(".")} - {"manifest.json"}
assert found == set(manifest["files"]) and len(found) == 7, found
P
[ "$(stat -c '%a %U' model-00001-of-00004.safetensors)" = '644 root' ] || say "mode or owner"
[ ! -e /run/glm-vllm-model-share ] || say "the secret of the transfer is still there"
! systemctl is-active --quiet glm-vllm-model-share || say "the transfer's daemon still runs"
