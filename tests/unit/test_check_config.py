"""`glm-vllm check-config` with the real parsers: the pinned 0.33.0 (its Python alone, on a CPU) and the twin's 0.32.0.

vLLM takes seconds to import, so each version runs once, over all files, in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from glm_vllm_overlay import cli
from glm_vllm_overlay.node import check_config

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / ".venv-engine/bin/python"
GB10 = ROOT / ".cache/vllm-0.33.0"
SPEC = importlib.util.spec_from_file_location("serve_yaml", ROOT / "plugins/filter/serve_yaml.py")
serve_yaml = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(serve_yaml)

DEFAULTS = yaml.safe_load((ROOT / "roles/glm-vllm-overlay/defaults/main.yml").read_text(encoding="utf-8"))
TWIN = {
    "speculator": "mtp",
    "kv_cache_dtype": "auto",
    "max_model_len": 2048,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 268435456,
    "prefix_caching": False,
    "exl3_backend": "reference",
    "limit_mm": {"image": 0, "video": 0},
}


def rendered(**changes):
    """What the role renders for these variables."""
    serving = DEFAULTS | {f"glm_vllm_overlay_{name}": value for name, value in changes.items()}
    options = serve_yaml.serve_config(serving, "/m", "192.0.2.1")
    return serve_yaml.serve_yaml(options)


# Files that both versions take as they are.
SOUND = {
    "gb10": rendered(),
    "gb10-ray": rendered(executor="ray"),
    "gb10-all-set": rendered(
        flashinfer_autotune=False,
        prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=11811160064,
        load_format="safetensors",
        extra_args={
            "max-logprobs": 20,
            "compilation-config": {"cudagraph_mode": "FULL"},
            "long-prefill-token-threshold": 1024,
        },
    ),
    "twin": rendered(**TWIN),
    "readable-numbers": "model: /m\nmax-model-len: 1m\nmax-num-batched-tokens: 4k\n",
    "nested": "model: /m\nkernel-config: {enable_flashinfer_autotune: false}\n",
    "lists": "model: /m\ncudagraph-capture-sizes: [1, 2, 4]\nserved-model-name: [a, b]\n",
}
# Files that both refuse: the key at fault and words of its sentence.
BROKEN = {
    "false": (
        "model: /m\nenable-prefix-caching: false\n",
        "enable-prefix-caching",
        "write no-enable-prefix-caching: true",
    ),
    "no-false": (
        "model: /m\nno-enable-prefix-caching: false\n",
        "no-enable-prefix-caching",
        "write enable-prefix-caching",
    ),
    "null": ("model: /m\nmax-logprobs:\n", "max-logprobs", "no value"),
    "unknown": ("model: /m\nno-such-option: 1\n", "no-such-option", "no option"),
    "abbreviated": ("model: /m\nmax-num-seq: 4\n", "max-num-seq", "exact name"),
    "contradiction": (
        "model: /m\nenable-prefix-caching: true\nno-enable-prefix-caching: true\n",
        "enable-prefix-caching",
        "arrives in the engine as False",
    ),
    "alias": (
        "model: /m\nmax-num-seqs: 4\nmax_num_seqs: 8\n",
        "max-num-seqs",
        "4 arrives in the engine as 8",
    ),
    "empty-list": ("model: /m\nmiddleware: []\n", "middleware", "empty list"),
    "not-a-number": ("model: /m\nmax-num-seqs: four\n", "", "max-num-seqs"),
    "not-json": ("model: /m\noverride-generation-config: x\n", "", "override-generation-config"),
    "bad-field": ("model: /m\nkernel-config: {no_such_field: 1}\n", "", "kernel-config"),
    "switch-with-value": ("model: /m\nenforce-eager: 'yes'\n", "enforce-eager", "it is a switch"),
    "word-too-many": ("model: /m\nmiddleware: [a, b]\n", "middleware", "arrives in the engine as ['a']"),
    "no-model": ("max-num-seqs: 4\n", "", "No model"),
    "tools-without-parser": ("model: /m\nenable-auto-tool-choice: true\n", "", "tool-call-parser"),
}
DRIVER = """
import contextlib, json, sys
from pathlib import Path
from glm_vllm_overlay.node import check_config
from glm_vllm_twin import torchvision_ops
torchvision_ops.declare()  # vLLM imports the registry's torchvision, whose compiled half needs CUDA
with contextlib.redirect_stdout(sys.stderr):
    found = {path: check_config.compare(check_config.read_config(Path(path))) for path in sys.argv[1:]}
    import vllm
print(json.dumps({"found": found, "from": vllm.__file__}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{version: {case: [[key, sentence], ...]}}, both versions at once."""
    if not ENGINE.exists() or not (GB10 / "vllm").exists():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "needs .venv-engine and .cache/vllm-0.33.0: run `make setup`"
        )
    folder = tmp_path_factory.mktemp("configs")
    cases = SOUND | {name: case[0] for name, case in BROKEN.items()}
    files = {name: folder / f"{name}.yaml" for name in cases}
    for name, text in cases.items():
        files[name].write_text(text, encoding="utf-8")
    running = {}
    for version, first in (("0.33.0", f"{GB10}:"), ("0.32.0", "")):
        environment = {**os.environ, "PYTHONPATH": f"{first}{ROOT}/files/overlay/src", "HF_HUB_OFFLINE": "1"}
        environment |= {"HOME": str(folder), "TMPDIR": str(folder), "VLLM_NO_USAGE_STATS": "1"}
        running[version] = subprocess.Popen(
            [ENGINE, "-c", DRIVER, *files.values()],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    outcome = {}
    for version, process in running.items():
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        document = json.loads(out)
        assert (str(GB10) in document["from"]) == (version == "0.33.0")
        outcome[version] = {name: document["found"][str(path)] for name, path in files.items()}
    return outcome


@pytest.mark.parametrize("version", ["0.33.0", "0.32.0"])
@pytest.mark.parametrize("case", SOUND)
def test_what_we_render_arrives(found, version, case):
    """Every key of each rendering reaches the engine as written."""
    assert found[version][case] == []


@pytest.mark.parametrize("version", ["0.33.0", "0.32.0"])
@pytest.mark.parametrize("case", BROKEN)
def test_what_would_be_lost_is_said(found, version, case):
    """One sentence, and only one, that names the key at fault."""
    _, key, words = BROKEN[case]
    (finding,) = found[version][case]
    assert finding[0] == key and words in finding[1]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("missing.yaml", None, "cannot be read"),
        ("serve.json", "model: /m", "not named .yaml"),
        ("list.yaml", "- a\n", "holds no keys"),
        ("empty.yaml", "", "holds no keys"),
        ("broken.yaml", "a: [", "not YAML"),
        ("binary.yaml", b"\xff\xfe\x00", "not YAML"),
    ],
)
def test_unusable_files(tmp_path, capsys, name, text, says):
    """Exit code 2 and one sentence, before vLLM is even looked for."""
    file = tmp_path / name
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert cli.main(["check-config", str(file)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("findings", "code"), [([], 0), ([("a", "a: is lost")], 1)])
def test_exit_code_and_json(tmp_path, capsys, monkeypatch, findings, code):
    """Standard output is one JSON document whatever vLLM prints meanwhile."""
    file = tmp_path / "serve.yaml"
    file.write_text("a: 1\n")
    monkeypatch.setattr(check_config, "compare", lambda config: (print("INFO noise"), findings)[1])
    assert check_config.run(argparse.Namespace(file=file, json=True)) == code
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["schema"] == 1 and document["ok"] is (not findings) and document["keys"] == 1
    assert [finding["message"] for finding in document["findings"]] == [sentence for _, sentence in findings]
    assert all(sentence in err for _, sentence in findings)


def test_without_vllm(tmp_path, capsys, monkeypatch):
    """An environment without the engine says which command to use."""
    file = tmp_path / "serve.yaml"
    file.write_text("a: 1\n")
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(check_config.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["check-config", str(file)]) == 2
    assert "has no vLLM" in capsys.readouterr().err
