#!/bin/sh
# Resolve every lock here anew: run it by hand when a pin in an input (*.in) changes, and review the difference.
# The twin's locks have their own inputs in twin/engine/.
set -eu
cd "$(dirname "$0")"
export UV_PYTHON_DOWNLOADS=never

resolve() { # input output [further arguments of uv pip compile]; header on stdin
    input=$1 output=$2
    shift 2
    uv pip compile "$input" --quiet --upgrade --generate-hashes --only-binary :all: \
        --no-emit-index-url --no-emit-find-links --no-annotate --no-header "$@" --output-file "$output.new"
    { cat; cat "$output.new"; } >"$output"
    rm "$output.new"
}

resolve gb10.in gb10-cp312-aarch64.txt --python-version 3.12 --python-platform aarch64-manylinux_2_39 <<'TEXT'
# The engine on a GB10: CPython 3.12, Linux aarch64, glibc 2.39, CUDA 13.0. Made by files/locks/lock.sh from gb10.in.
# humming-kernels drags in nvidia-cuda-nvcc and nvidia-nvvm 13.5, newer than the driver: they are never used and on no PATH.
# Unverified: resolved with hashes, never installed on a GB10.
TEXT

resolve build.in build-x86_64.txt --python-version 3.12 --python-platform x86_64-manylinux_2_31 --no-deps <<'TEXT'
# For compiling the kernels and reading the pinned engine's Python on an x86-64 machine without a GPU; nothing here is
# installed on a node and no dependency is followed. Made by files/locks/lock.sh from build.in.
TEXT

resolve hub.in hub.txt --python-version 3.12 --python-platform aarch64-manylinux_2_39 <<'TEXT'
# The tool that asks the model hub, on the head of a real pair, in an environment of its own. Made by files/locks/lock.sh
# from hub.in.
TEXT

resolve controller.in controller.txt --python-version 3.11 --universal <<'TEXT'
# The controller's .venv: Python 3.11 and later, any platform. Made by files/locks/lock.sh from controller.in.
TEXT

resolve uv.in uv.txt --python-version 3.11 --universal <<'TEXT'
# The installer of everything else, itself pinned: on the controller and, from the same file, on every node. Made by files/locks/lock.sh.
TEXT
