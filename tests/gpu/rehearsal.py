"""A start that compiles nothing: vLLM 0.33.0 on a GPU, after `glm-vllm build --rehearsal` had never seen its weights.

    python rehearsal.py WORK OUT.json [--prefix-caching]      needs vLLM 0.33.0, the kernels ($GLM_EXL3_LIBRARY), a GPU

Writes a tiny packed checkpoint of eight layers, empties caches below WORK, rehearses (random weights, few experts),
starts the engine on the checkpoint in another process with CUDA graphs and prompts that the rehearsal did not have, and
wants to see that nothing was compiled. Then the test of the test: one file of each compiler goes away and the gate's
check has to name it, their entries go away and the next start has to compile them. About five minutes, unattended;
OUT.json is written after each step. Exit 0 when all of it holds.

On sm_90 the attention backend is FLASHMLA_SPARSE; on a GB10 leave it to vLLM (`--engine '{}'`). FlashInfer's sampler is
off, since its module is one of those that `glm-vllm build --modules` makes and takes the longest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import serving  # noqa: E402  its checkpoint, with more layers

KEY = "release-shape"
KINDS = {"TRITON_CACHE_DIR": "triton", "TILELANG_CACHE_DIR": "tilelang", "DG_JIT_CACHE_DIR": "deepgemm"}
OTHERS = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "others"}
OPTIONS: dict[str, Any] = {
    "additional-config": '{"exl3_backend":"fused"}',
    "distributed-executor-backend": "mp",
    "kv-cache-dtype": "fp8_ds_mla",
    "kv-cache-memory-bytes": 4 << 30,
    "limit-mm-per-prompt": '{"image":0,"video":0}',
    "load-format": "auto",
    "max-model-len": 49152,
    "max-num-batched-tokens": 2048,
    "max-num-seqs": 4,
    "model-loader-extra-config": '{"enable_weights_track":true}',
    "no-enable-flashinfer-autotune": True,
    "quantization": "exl3",
    "tensor-parallel-size": 1,
}
# Prompts of the real start, together in one step and one by one: none of them a length of the rehearsal's.
TOGETHER = [7, 19, 301, 1717, 3210, 45000]
ALONE = [5, 111, 999, 2222]


def checkpoint(folder: Path) -> None:
    """serving.py's checkpoint, its layers twice: in the rehearsal three of the second four have no experts."""
    serving.TEXT["num_hidden_layers"] *= 2
    for name in ("layer_types", "mlp_layer_types"):
        serving.TEXT[name] = serving.TEXT[name] + [serving.TEXT[name][1], *serving.TEXT[name][1:]]
    serving.write_checkpoint(folder)


def environment(work: Path) -> dict[str, str]:
    """The engine's, its caches below `work`, and our package as vLLM finds an installed one's plug-ins."""
    caches, site = work / KEY, work / "site/glm_vllm_overlay-0.1.0.dist-info"
    site.mkdir(parents=True, exist_ok=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: glm-vllm-overlay\nVersion: 0.1.0\n")
    project = tomllib.loads((serving.SOURCES.parent / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    lines = ["[vllm.general_plugins]", *(f"{name} = {target}" for name, target in points.items())]
    (site / "entry_points.txt").write_text("\n".join(lines) + "\n")
    found = {name: str(caches / folder) for name, folder in (KINDS | OTHERS).items()}
    found |= {
        "FLASHINFER_WORKSPACE_BASE": str(work / "modules"),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "MAX_JOBS": "1",
        "PYTHONPATH": f"{site.parent}:{serving.SOURCES}:{os.environ.get('PYTHONPATH', '')}",
    }
    return os.environ | found


def start(config: Path) -> dict[str, Any]:
    """The real engine, in this process's charge: answers, seconds to boot, and what was compiled."""
    from glm_vllm_overlay import rehearsal
    from glm_vllm_overlay.node.check_config import read_config
    from glm_vllm_overlay.node.release import compiled_since, machine_code

    before, began = machine_code(os.environ), time.time()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    served = read_config(config)
    served.pop("distributed-executor-backend")
    llm = LLM.from_engine_args(rehearsal.engine_arguments(served, "none", None, config.read_text()))
    boot = time.time() - began
    model = llm.llm_engine.vllm_config.model_config
    longest, vocabulary = model.max_model_len, model.get_vocab_size()

    def ask(lengths: list[int], **sampling: Any) -> list[list[int]]:
        texts = [rehearsal.prompt(min(length, longest - 16), 7 * length, vocabulary) for length in lengths]
        prompts = [TokensPrompt(prompt_token_ids=text) for text in texts]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, **sampling), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    answers = [ask(TOGETHER, temperature=0.0), ask(TOGETHER[:3], temperature=0.7, top_p=0.8, top_k=20)]
    answers += [ask([length], temperature=0.0) for length in ALONE]
    after = machine_code(os.environ)
    return {
        "boot_seconds": round(boot, 1),
        "seconds": round(time.time() - began, 1),
        "answers": sum(map(len, answers)),
        "new": sorted(str(file) for file, when in after.items() if before.get(file) != when),
        "said": compiled_since(before, os.environ, rehearsed=True),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--engine", default='{"attention-backend": "FLASHMLA_SPARSE"}', help="further options, JSON")
    parser.add_argument("--cuda-home", default=os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    parser.add_argument("--step", choices=("checkpoint", "start"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder, config = args.work / "packed", args.work / "serve.yaml"
    if args.step == "checkpoint":
        checkpoint(folder)
        return 0
    if args.step == "start":
        print("RESULT" + json.dumps(start(config)), flush=True)
        return 0

    args.work.mkdir(parents=True, exist_ok=True)
    caches, given = args.work / KEY, environment(args.work)
    report: dict[str, Any] = {"schema": 1, "ok": False, "steps": {}}
    checks: dict[str, bool] = {}

    def run(name: str, *command: str, limit: int = 300) -> str:
        """Standard output of one step; what went wrong, and for how long it ran, go into the report."""
        began = time.time()
        try:
            done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=limit, check=False)
            code, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            code, out, err = 124, "", str(error.stderr or b"", "utf-8", "replace")
        report["steps"][name] = {"code": code, "seconds": round(time.time() - began, 1)}
        if code:
            report["steps"][name] |= {"stdout": out[-3000:], "stderr": err[-6000:]}
        save()
        return out if code == 0 else ""

    def save() -> None:
        args.out.write_text(json.dumps(report | {"checks": checks}, indent=1) + "\n")

    def own(step: str) -> list[str]:
        return [sys.executable, __file__, str(args.work), str(args.out), "--step", step]

    def started(name: str) -> dict[str, Any]:
        line = next((line for line in run(name, *own("start")).splitlines() if line.startswith("RESULT")), "RESULT{}")
        report["steps"][name] |= json.loads(line.removeprefix("RESULT"))
        save()
        return report["steps"][name]

    if not folder.exists():
        folder.mkdir()
        run("checkpoint", *own("checkpoint"))
    switch = "enable-prefix-caching" if args.prefix_caching else "no-enable-prefix-caching"
    options = OPTIONS | {"model": str(folder), switch: True} | json.loads(args.engine)
    config.write_text("".join(f"{key}: {value if isinstance(value, str) and value[:1] != '{' else json.dumps(value)}\n"
                              for key, value in options.items()))  # fmt: skip
    for stale in (caches, args.work / "modules"):
        shutil.rmtree(stale, ignore_errors=True)

    from glm_vllm_overlay.node.release import REHEARSAL, rehearsal_problem

    nvcc = Path(args.cuda_home) / "bin/nvcc"
    report["before"] = rehearsal_problem(caches, nvcc)
    checks["refused before the rehearsal"] = bool(report["before"])
    command = [sys.executable, "-m", "glm_vllm_overlay", "build", "--json", f"--rehearsal={config}"]
    run("rehearsal", *command, f"--cuda-home={args.cuda_home}")
    if not (caches / REHEARSAL).is_file():  # whether our hooks are the reason
        given["VLLM_PLUGINS"] = "glm_exl3"
        run("rehearsal without hooks", *command, f"--cuda-home={args.cuda_home}")
    checks["the rehearsal gets through"] = (caches / REHEARSAL).is_file()
    if checks["the rehearsal gets through"]:
        listed = json.loads((caches / REHEARSAL).read_text())
        files = sorted(listed["files"])
        report["list"] = {key: value for key, value in listed.items() if key != "files"}
        report["list"]["files"] = {kind: sum(file.startswith(f"{kind}/") for file in files) for kind in KINDS.values()}
        report["list"]["others"] = [file for file in files if file.split("/")[0] not in KINDS.values()]
        checks["the gate takes it"] = rehearsal_problem(caches, nvcc) == ""
        first = started("start")
        checks["the start answers"] = first.get("answers") == len(TOGETHER) + 3 + len(ALONE)
        checks["the start compiles nothing"] = first.get("new") == []
        save()

        chosen = {kind: next((file for file in files if file.startswith(f"{kind}/")), "") for kind in KINDS.values()}
        checks["every compiler was met"] = all(chosen.values())
        entries = []
        for kind, file in chosen.items():
            if not file:
                continue
            away = caches / file
            away.rename(away.with_name("away"))
            report[f"without {kind}"] = rehearsal_problem(caches, nvcc)
            checks[f"the gate names {kind}'s"] = report[f"without {kind}"] == f"lacks {file}"
            away.with_name("away").rename(away)
            entries.append(away.parent)
        # Triton takes an entry without its cubin for whole and falls over it, so whole entries go.
        for entry in entries:
            shutil.rmtree(entry)
        again = started("start without them")
        new = again.get("new", [])
        for kind in KINDS.values():
            checks[f"the start compiles {kind}'s again"] = any(f"/{KEY}/{kind}/" in file for file in new)
    report["ok"] = all(checks.values())
    save()
    print(json.dumps({"ok": report["ok"], "checks": checks}, indent=1))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
