#!/usr/bin/env bash
# Build the kernels for the GPU of this machine, run the GPU tests and the benchmark, unattended.
#   usage: tests/gpu/run_all.sh EXLLAMAV3_EXT OUT      EXLLAMAV3_EXT: exllamav3's CUDA sources, OUT: folder for results
set -uo pipefail
sources=${1:?usage: run_all.sh EXLLAMAV3_EXT OUT} out=${2:?usage: run_all.sh EXLLAMAV3_EXT OUT}
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="$root/files/overlay/src${PYTHONPATH:+:$PYTHONPATH}"
export GLM_EXL3_LIBRARY=${GLM_EXL3_LIBRARY:-/tmp/glm-exl3/glm_exl3.so} PYTHONUNBUFFERED=1
mkdir -p "$out"
# Hopper's wgmma needs no 90a here: the sources are generic; a GB10 is 121a.
arch=$(python3 -c 'import torch; c = torch.cuda.get_device_capability(); print("121a" if c == (12, 1) else f"{c[0]}{c[1]}")')
# A GB10 chooses the backend that it serves with; elsewhere the default one compiles for minutes.
engine='{}' rehearsed='{}'
[ "$arch" = 121a ] || { engine='{"attention_backend": "FLASHMLA_SPARSE"}' rehearsed='{"attention-backend": "FLASHMLA_SPARSE"}'; }
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm --format=csv | tee "$out/device.csv"
python3 - "$sources" "$arch" <<'P' 2>&1 | tee "$out/build.log"
import argparse, sys
from pathlib import Path
from glm_vllm_overlay import build
parser = argparse.ArgumentParser()
parser.add_argument("--json", action="store_true")
build.add_arguments(parser)
target = "/tmp/glm-exl3"
arguments = ["--exllamav3", sys.argv[1], "--arch", sys.argv[2], "--target", target, "--work", "/tmp/glm-exl3-work"]
print(build.run(parser.parse_args([*arguments, "--jobs", "16"])))
P
python3 -m pytest -q -rA -p no:cacheprovider "$root/tests/gpu/test_kernels.py" "$root/tests/gpu/test_modules.py" "$root/tests/gpu/test_upstream.py" 2>&1 | tee "$out/kernels.log" | tail -25
python3 "$root/files/overlay/benchmarks/moe.py" --exllamav3 "$sources" --out "$out/moe.json" 2>&1 | tee "$out/moe.log" | tail -14
python3 "$root/tests/gpu/pool_alignment.py" /tmp/glm-pools "$out/pool_alignment.json" --engine "$engine" 2>&1 | tee "$out/pool_alignment.log" | tail -3
python3 "$root/tests/gpu/rehearsal.py" /tmp/glm-rehearsal "$out/rehearsal.json" --engine "$rehearsed" 2>&1 | tee "$out/rehearsal.log" | tail -20
python3 "$root/tests/gpu/hardware_check.py" /tmp/glm-hardware "$out/hardware_check.json" 2>&1 | tee "$out/hardware_check.log" | tail -15
