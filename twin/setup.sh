#!/bin/bash
# What a controller needs, made once and then only looked at. Called by the Makefile, in this order:
#   setup.sh packages     Debian packages
#   setup.sh controller   .venv: Ansible, linters, test tools
#   setup.sh wheelhouse   the wheels that the nodes install from, with every hash checked
#   setup.sh engine       .venv-engine: the twin's vLLM, from the wheelhouse
#   setup.sh pinned       .cache/vllm-*: the Python of the GB10's vLLM, for tests of its parser, scheduler and planner
#   setup.sh kernels      sources, headers and tools that compile the kernels for a GB10 without a GPU
# pip's own configuration says where packages come from; this file names no registry.
set -euo pipefail
ROOT=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd); cd "$ROOT"
STATE=${TWIN_STATE:-/var/tmp/glm-twin} CACHE=${TWIN_CACHE:-/var/tmp/glm-twin}
WHEELS=$CACHE/wheels
LOCKS=files/locks
export DEBIAN_FRONTEND=noninteractive PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 UV_NO_PROGRESS=1 UV_PYTHON_DOWNLOADS=never

PACKAGES=(systemd-container mmdebstrap netcat-openbsd openssh-client iproute2 dpkg-dev g++ rsync curl procps python3-venv ca-certificates)
CHECKERS=(nginx-light nftables netplan.io)     # `nginx -t`, `nft -c` and `netplan generate` on what the roles render

die() { echo "setup: $*" >&2; exit 1; }
step() { # step TEXT CMD...: one line a step, with its seconds; CMD's output only when it fails
  local text=$1 t=$SECONDS log; shift; log=$(mktemp); printf '  %-58s' "$text"
  if "$@" </dev/null >"$log" 2>&1; then printf '%4d s\n' $((SECONDS - t)); rm -f "$log"
  else printf ' failed after %d s\n' $((SECONDS - t)); grep -v 'is ignored: it is neither a file nor a directory' "$log" | tail -40; rm -f "$log"; exit 1; fi
}
digest() { cat "$@" | sha256sum | cut -c1-16; }
done_already() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }     # done_already STAMP VALUE

nodes_python() { (. /etc/os-release; awk -v id="$ID" -v v="$VERSION_ID" '$1 == id && $2 == v { print $4 }' twin/suites); }
newest_python() { # the newest that works, 3.12 or later if there is one; pyenv's too, whatever its current choice is
  local minor python version
  for minor in 14 13 12 11; do
    while read -r python; do
      if "$python" -c "import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, $minor))" 2>/dev/null; then echo "$python"; return; fi
    done < <(type -aP "python3.$minor" || true
      if command -v pyenv >/dev/null; then
        pyenv versions --bare | grep "^3\.$minor\." | while read -r version; do echo "$(pyenv prefix "$version")/bin/python"; done; fi)
  done
  die "no Python 3.11 or later with the venv module: install python3-venv"
}

room() {
  local kb; kb=$(awk '/^MemTotal:/ { print $2 }' /proc/meminfo)
  [ "$kb" -ge $((23 * 1024 * 1024 / 2)) ] || die "the twin needs 12 GiB of memory and this machine has $((kb / 1024 / 1024)) GiB: two vLLM ranks would not fit"
  mkdir -p "$STATE"; [ -d "$ROOT/.venv-engine" ] && return 0     # once it is filled, it stays as large
  kb=$(df -k --output=avail "$STATE" | tail -1)
  [ "$kb" -ge 20000000 ] || die "the twin needs 20 GB of disk and $STATE has $((kb / 1000000)) GB free: make room, or set TWIN_STATE and TWIN_CACHE to a larger disk"
}

packages() {
  local missing=() p policy=/usr/sbin/policy-rc.d
  room
  for p in "${PACKAGES[@]}" "${CHECKERS[@]}"; do dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q ' installed$' || missing+=("$p"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  # The checkers are wanted as programs: their services are not started here.
  if [ ! -e $policy ]; then printf '#!/bin/sh\nexit 101\n' > $policy; chmod 755 $policy; trap 'rm -f /usr/sbin/policy-rc.d' EXIT; fi
  step "package lists" apt-get -q -o DPkg::Lock::Timeout=300 update
  step "Debian packages: ${missing[*]}" apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "${missing[@]}"
  if [[ " ${missing[*]} " == *" nginx-light "* ]]; then systemctl disable nginx.service >/dev/null 2>&1 || true; fi   # fails without a running systemd, where nothing would start it either
}

controller() {
  local python id; id=$(digest $LOCKS/controller.txt $LOCKS/uv.txt)
  done_already .venv/.made "$id" && return 0
  python=$(newest_python); rm -rf .venv
  step "$("$python" -V) environment for Ansible" "$python" -m venv .venv
  step "Ansible, linters, test tools" .venv/bin/python -m pip install -q --require-hashes -r $LOCKS/uv.txt -r $LOCKS/controller.txt
  echo "$id" > .venv/.made
}

engine_lock() { echo "$LOCKS/twin-cp${1/./}-x86_64.txt"; }
test_lock() { awk '/^[a-z]/ { keep = /^(pytest|pytest-timeout|iniconfig|pluggy)==/ } keep' $LOCKS/controller.txt; }
collect() { # collect PYTHON [pip option...]
  local python=$1; shift
  "$python" -m pip download -q --no-deps --only-binary :all: --require-hashes --find-links "$WHEELS" --dest "$WHEELS" "$@"
}
torch_collect() { # a site whose pip knows no CPU build of torch: uv knows where they are, and says so
  local python=$1 version=$2 index
  index=$(echo "torch==$version" | .venv/bin/uv pip compile - --quiet --no-deps --no-header --torch-backend cpu --python-version "$3" --emit-index-annotation | sed -n 's/^ *# from //p')
  "$python" -m pip download -q --no-deps --only-binary :all: --extra-index-url "$index" --dest "$WHEELS" "torch==$version"
}
wheelhouse() {
  local want python lock id has; want=$(nodes_python); lock=$(engine_lock "$want"); python=$(type -P "python$want") || die "the wheels need the nodes' Python $want: install python$want"
  id=$(digest "$lock" $LOCKS/uv.txt $LOCKS/controller.txt); mkdir -p "$WHEELS"
  done_already "$WHEELS/.made" "$id" && return 0
  [ -x .venv/bin/uv ] || controller
  has=$("$python" -m pip --version 2>/dev/null) || has=
  if [ -z "$has" ]; then step "pip for Python $want" "$python" -m venv "$STATE/pip"; python=$STATE/pip/bin/python; fi
  if ! collect "$python" -r <(awk '/^[a-z]/ { keep = /^torch==/ } keep' "$lock") >/dev/null 2>&1; then
    step "torch for the CPU" torch_collect "$python" "$(sed -n 's/^torch==\([^ ]*\).*/\1/p' "$lock")" "$want"; fi
  test_lock > "$WHEELS/tests.txt"
  step "wheels for the nodes ($(grep -c '^[a-z].*==' "$lock") packages)" collect "$python" -r "$lock" -r $LOCKS/uv.txt -r "$WHEELS/tests.txt"
  echo "$id" > "$WHEELS/.made"
}

engine() {
  local want lock id part; want=$(nodes_python); lock=$(engine_lock "$want")
  id=$(digest "$lock" files/overlay/pyproject.toml twin/engine/pyproject.toml twin/engine/vllm-metadata/pyproject.toml)
  done_already .venv-engine/.made "$id" && return 0
  step "Python $want environment for the engine" .venv/bin/uv venv --quiet --allow-existing --python "$want" .venv-engine
  export VIRTUAL_ENV=$ROOT/.venv-engine
  step "vLLM for the CPU, from the wheelhouse" .venv/bin/uv pip sync --no-index --find-links "$WHEELS" --require-hashes "$lock"
  step "its test tools" .venv/bin/uv pip install --no-index --no-deps --find-links "$WHEELS" --require-hashes -r <(test_lock)
  for part in twin/engine/vllm-metadata twin/engine files/overlay; do
    step "$part" .venv/bin/uv pip install --no-index --no-deps --no-build-isolation --editable "$part"; done
  echo "$id" > .venv-engine/.made
}

unpack() { # unpack WHEELS FOLDER: without libraries, which nothing here loads, and with programs that can be run
  .venv/bin/python -c '
import pathlib, re, sys, zipfile
for wheel in pathlib.Path(sys.argv[1]).glob("*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if not re.search(r"\.(so|a|cubin)(\.\d+)*$", member.filename):
                path = archive.extract(member, sys.argv[2])
                if member.external_attr >> 16 & 0o111 and not member.is_dir():
                    pathlib.Path(path).chmod(0o755)
' "$@"
}
unpacked() { # unpacked TEXT PACKAGES FOLDER: those packages of the build lock (a pattern), unpacked into FOLDER
  local d; mkdir -p "${3%/*}"; d=$(mktemp -d "$3.XXXXXX")
  step "$1" .venv/bin/python -m pip download -q --no-deps --only-binary :all: --require-hashes --dest "$d" \
    -r <(awk -v wanted="^($2)==" '/^[a-z]/ { keep = $0 ~ wanted } keep' $LOCKS/build-x86_64.txt)
  unpack "$d" "$d/out"; rm -rf "$3"; mv "$d/out" "$3"; rm -rf "$d"
}
pinned() {
  local version; version=$(sed -n 's/^vllm==\([^ ]*\).*/\1/p' $LOCKS/build-x86_64.txt)
  [ -d ".cache/vllm-$version" ] || unpacked "vLLM $version of the GB10, to be read" vllm ".cache/vllm-$version"
}
own_nvcc() { # whether this machine has an nvcc that `glm-vllm build` takes
  PYTHONPATH=files/overlay/src .venv/bin/python -c '
from glm_vllm_overlay.exl3 import build
home = build.default_cuda_home()
build.Toolchain(home, home, home).nvcc_version()' 2>/dev/null
}
kernels() {
  local wanted='exllamav3|nvidia-(cublas|cusparse|cusolver|curand|cuda-cuobjdump)' id
  own_nvcc || wanted+='|nvidia-(cuda-nvcc|nvvm|cuda-crt|cuda-runtime|cuda-cccl)'
  id=$(digest $LOCKS/build-x86_64.txt <(echo "$wanted"))
  done_already "$CACHE/kernels/site/.made" "$id" && return 0
  unpacked "what compiles the kernels without a GPU" "$wanted" "$CACHE/kernels/site"
  echo "$id" > "$CACHE/kernels/site/.made"
}

[ "$(id -u)" = 0 ] || die "run as root"
case ${1:-} in
  packages|controller|wheelhouse|engine|pinned|kernels) "$1";;
  *) sed -n 2,9p "$0"; exit 2;;
esac
