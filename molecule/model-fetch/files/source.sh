#!/bin/bash
# source.sh FOLDER: random bytes in the shape of a checkpoint.
set -euo pipefail
mkdir -p "$1/assets"
for n in 1 2 3 4; do head -c 3000000 /dev/urandom > "$1/model-0000$n-of-00004.safetensors"; done
head -c 777 /dev/urandom > "$1/assets/logo.bin"
: > "$1/empty.txt"
echo '{"model_type": "random"}' > "$1/config.json"
