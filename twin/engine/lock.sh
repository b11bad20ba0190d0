#!/bin/sh
# Resolve the twin's two locks anew from twin.in: run it by hand, when a pin in twin.in changes, and review the difference.
# A folder of wheels that pip's configuration names is read too: the CPU build of torch lies on no default index.
set -eu
cd "$(dirname "$0")"
locks=../../files/locks
links=$(python3 -m pip config list | sed -n "s/^.*\.find-links='\(.*\)'$/\1/p" | head -n 1)

resolve() { # python-version output [further arguments of uv pip compile]
    python=$1 output=$2
    shift 2
    uv pip compile twin.in --quiet --upgrade --generate-hashes --only-binary :all: \
        --python-version "$python" --python-platform x86_64-manylinux_2_31 ${links:+--find-links "$links"} \
        --excludes twin.excludes --no-emit-index-url --no-emit-find-links --no-annotate --no-header "$@" --output-file "$output.new"
}

finish() { # output, header on stdin
    { cat; cat "$1.new"; } >"$1"
    rm "$1.new"
}

resolve 3.11 $locks/twin-cp311-x86_64.txt
finish $locks/twin-cp311-x86_64.txt <<'TEXT'
# The twin's engine on CPython 3.11, Linux x86-64, glibc 2.31 or later. Made by twin/engine/lock.sh from twin/engine/twin.in.
# Install with: uv pip sync --require-hashes --find-links WHEELS files/locks/twin-cp311-x86_64.txt
# where WHEELS is a folder that holds torch 2.13.0+cpu.
TEXT

resolve 3.12 $locks/twin-cp312-x86_64.txt --excludes twin-cp312.excludes
finish $locks/twin-cp312-x86_64.txt <<'TEXT'
# The twin's engine on CPython 3.12, Linux x86-64, glibc 2.31 or later. Made by twin/engine/lock.sh from twin/engine/twin.in.
# torch is not in this list: no wheel of its CPU build for CPython 3.12 was at hand to take a hash from. Install in this order:
#   uv pip sync --require-hashes files/locks/twin-cp312-x86_64.txt
#   uv pip install --no-deps --torch-backend cpu torch==2.13.0+cpu
# Unverified: this list was resolved and never installed.
TEXT
