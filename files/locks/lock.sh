#!/bin/sh
# Resolve the GB10 and build locks anew: run it by hand when a pin in gb10.in or build.in changes, and review the difference.
# The twin's locks have their own inputs in twin/engine/.
set -eu
cd "$(dirname "$0")"
export UV_PYTHON_DOWNLOADS=never

resolve() { # input output platform [further arguments of uv pip compile]; header on stdin
    input=$1 output=$2 platform=$3
    shift 3
    uv pip compile "$input" --quiet --upgrade --generate-hashes --only-binary :all: --python-version 3.12 \
        --python-platform "$platform" --no-emit-index-url --no-emit-find-links --no-annotate --no-header "$@" \
        --output-file "$output.new"
    { cat; cat "$output.new"; } >"$output"
    rm "$output.new"
}

resolve gb10.in gb10-cp312-aarch64.txt aarch64-manylinux_2_39 <<'TEXT'
# The engine on a GB10: CPython 3.12, Linux aarch64, glibc 2.39, CUDA 13.0. Made by files/locks/lock.sh from gb10.in.
# humming-kernels drags in nvidia-cuda-nvcc and nvidia-nvvm 13.5, newer than the driver: they are never used and on no PATH.
# Unverified: resolved with hashes, never installed on a GB10.
TEXT

resolve build.in build-x86_64.txt x86_64-manylinux_2_31 --no-deps <<'TEXT'
# For compiling the kernels and reading the pinned engine's Python on an x86-64 machine without a GPU; nothing here is
# installed on a node and no dependency is followed. Made by files/locks/lock.sh from build.in.
TEXT

resolve hub.in hub.txt aarch64-manylinux_2_39 <<'TEXT'
# The tool that asks the model hub, on the head of a real pair, in an environment of its own. Made by files/locks/lock.sh
# from hub.in.
TEXT
