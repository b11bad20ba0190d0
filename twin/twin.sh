#!/bin/bash
# The twin: two systemd machines in the place of two DGX Sparks. systemd-nspawn with a real systemd as PID 1 and a
# real sshd, a management bridge, and veth cables in the place of the ConnectX-7 fabric. docs/architecture.md says why.
#
#   twin.sh up                        both nodes, from whatever state; returns when both answer ssh
#   twin.sh down                      both off, their disks kept
#   twin.sh clean                     both away: no process, mount, namespace or cgroup of ours is left; caches stay
#   twin.sh status                    one line a node, cable and owner
#   twin.sh start|stop|kill|reset N   N is spark-a or spark-b; kill cuts the power, reset gives a new disk (powered off)
#   twin.sh cut|mend mgmt:N|cable0|cable1
#   twin.sh swap N                    the cable of N goes from port 1 to port 0, or back
#   twin.sh meminfo N KB              what /proc/meminfo of N calls MemAvailable, from now on
#   twin.sh sh N CMD...               run CMD on N, without any network
#   twin.sh ctl CMD...                run CMD in the controller's network namespace, from where the nodes can be reached
#   twin.sh own NAME CMD...           run CMD as the only one who may change this bed
#   twin.sh ready                     fill the caches only (root file system, apt repository)
#
# Beds live side by side when these differ; the caches are shared:
#   TWIN_PREFIX (twin)  TWIN_STATE (/var/tmp/glm-twin)  TWIN_NET (10.77.0)  TWIN_CACHE (/var/tmp/glm-twin)
# A bed of up to four nodes: TWIN_NODES (2); they meet in a switch, or with TWIN_RING=1 in a ring of cables, from port 1
# of each node to port 0 of the next one.
# TWIN_STATE is outside the clone because inventory/twin has to name it in a plain string.
set -euo pipefail
SELF=$(readlink -f "${BASH_SOURCE[0]}"); HERE=$(dirname "$SELF")
P=${TWIN_PREFIX:-twin}
STATE=${TWIN_STATE:-/var/tmp/glm-twin}
NET=${TWIN_NET:-10.77.0}
CACHE=${TWIN_CACHE:-/var/tmp/glm-twin}
RUN=$STATE/run MODELS=$STATE/models REPO=$CACHE/repo WHEELS=$CACHE/wheels
CTL=$P-ctl
ALL=(spark-a spark-b spark-c spark-d); NODES=("${ALL[@]:0:${TWIN_NODES:-2}}")
declare -A IP=([spark-a]=$NET.11 [spark-b]=$NET.12 [spark-c]=$NET.13 [spark-d]=$NET.14)
# Both halves of both QSFP ports under the names of DGX OS; port 1 has the cable, and in a ring both have one.
PORT1=(enp1s0f1np1 enP2p1s0f1np1); PORT0=(enp1s0f0np0 enP2p1s0f0np0)
CABLES=(0 1); [ -z "${TWIN_RING:-}" ] || CABLES=(); for j in "${!NODES[@]}"; do [ -z "${TWIN_RING:-}" ] || CABLES+=("$j-0" "$j-1"); done
LINKS=("${CABLES[@]/#/cable}" "${NODES[@]/#/mgmt:}")
CG=/sys/fs/cgroup; [ "$(stat -fc %T $CG)" = cgroup2fs ] || CG=/sys/fs/cgroup/unified

log() { printf 'twin: %s\n' "$*" >&2; }
die() { log "$*"; exit 1; }
ns() { echo "$P-$1"; }
has_ns() { [ -e "/run/netns/$1" ]; }
is_node() { [[ " ${NODES[*]} " == *" ${1:-} "* ]] || die "no node named '${1:-}': say one of ${NODES[*]}"; }
is_link() { [[ " ${LINKS[*]} " == *" ${1:-} "* ]] || die "no link named '${1:-}': say one of ${LINKS[*]}"; }

# ---- who owns the bed -----------------------------------------------------------------------------------------------
# The lock belongs to the process that runs CMD and goes with it, however it ends.
own() {
  local name=$1; shift; mkdir -p "$STATE"
  [ "${TWIN_OWNER:-}" != "$name" ] || exec "$@"     # already inside
  free_or_die
  exec flock --close --nonblock --conflict-exit-code 75 "$STATE/lock" \
    env TWIN_OWNER="$name" bash -c 'echo "$TWIN_OWNER (process $$, since $(date +%H:%M:%S))" > "$0"; exec "$@"' "$STATE/owner" "$@"
}
free_or_die() {
  [ -e "$STATE/lock" ] || return 0
  flock -n "$STATE/lock" true && return 0
  [ -n "${TWIN_OWNER:-}" ] && [[ "$(cat "$STATE/owner" 2>/dev/null)" == "$TWIN_OWNER ("* ]] && return 0
  die "this bed is in use by $(cat "$STATE/owner" 2>/dev/null || echo 'someone'): wait until it ends, or set TWIN_PREFIX, TWIN_STATE and TWIN_NET for a bed of your own"
}

# ---- caches: root file system and apt repository --------------------------------------------------------------------
# twin/suites: how each distribution of the controller becomes a node of the same suite.
suite() { (. /etc/os-release; awk -v id="$ID" -v v="$VERSION_ID" '$1 == id && $2 == v { print $3, $5; found = 1 } END { exit !found }' "$HERE/suites") \
  || die "twin/suites has no line for this machine's /etc/os-release: the twin runs on Debian 12"; }
INCLUDE=systemd,netplan.io,systemd-sysv,dbus,libpam-systemd,udev,kmod,openssh-server,python3,python3-venv,python3-apt,sudo,iproute2,iputils-ping,procps,nftables,rsync,curl,ca-certificates
base_id() { { suite; sed -n '/^make_base() {/,/^}/p;/^INCLUDE=/p' "$SELF"; cat "$HERE/standins/twin-standins.service"; } | sha256sum | cut -c1-12; }
repo_id() { { base_id; cat "$HERE/packages.txt"; } | sha256sum | cut -c1-12; }
packages() { sed 's/#.*//' "$HERE/packages.txt" | xargs; }

ready() {
  mkdir -p "$CACHE" "$WHEELS" "$REPO" "$MODELS"
  BASE=$CACHE/base-$(base_id)
  exec 8>"$CACHE/caches.lock"; flock 8
  [ -d "$BASE" ] || make_base
  [ "$(cat "$REPO/.id" 2>/dev/null)" = "$(repo_id)" ] || make_repo
  exec 8>&-
}
make_base() {
  local b=$BASE.tmp t=$SECONDS name extra s old; read -r name extra <<<"$(suite)"
  log "building the nodes' root file system ($name)"
  local -a from=()      # this machine's own sources of that suite: they are known to be reachable from here
  for s in /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list /etc/apt/sources.list; do
    if [ -s "$s" ] && grep -qE "(^|[[:space:]])$name([[:space:]]|$)" "$s"; then from+=("$s"); fi; done
  rm -rf "$b"
  mmdebstrap --quiet --variant=minbase --mode=root --include="$INCLUDE${extra:+,$extra}" \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --aptopt='Apt::Install-Recommends "false"' "$name" "$b" "${from[@]}" >/dev/null
  cp -a "$b/etc/apt" "$b/usr/share/twin-apt"      # the machine's sources, for make_repo only; the nodes get file:/srv/repo
  rm -rf "$b"/etc/ssh/ssh_host_* "$b/etc/resolv.conf" "$b"/etc/apt/sources.list.d/*; : > "$b/etc/machine-id"
  echo 'deb [trusted=yes] file:/srv/repo ./' > "$b/etc/apt/sources.list"
  touch -d @0 "$b/var/lib/apt/lists"              # or `apt: cache_valid_time` takes the emptied lists for fresh ones
  chroot "$b" useradd --create-home --shell /bin/bash --groups sudo ops
  echo 'ops ALL=(ALL) NOPASSWD:ALL' > "$b/etc/sudoers.d/ops"; chmod 440 "$b/etc/sudoers.d/ops"
  printf '[global]\nno-index = true\nfind-links = /srv/wheels\n' > "$b/etc/pip.conf"
  mkdir -p "$b/etc/uv"; printf 'no-index = true\nfind-links = ["/srv/wheels"]\npython-downloads = "never"\n' > "$b/etc/uv/uv.toml"
  # What means nothing in a container. Everything else stays as the distribution ships it.
  chroot "$b" systemctl mask systemd-udevd.service getty@tty1.service console-getty.service apt-daily.timer apt-daily-upgrade.timer \
    e2scrub_all.timer fstrim.timer >/dev/null 2>&1
  install -m644 "$HERE/standins/twin-standins.service" "$b/etc/systemd/system/"
  chroot "$b" systemctl enable twin-standins.service >/dev/null 2>&1
  mv "$b" "$BASE"; log "root file system ready, $((SECONDS - t)) s"
  for old in "$CACHE"/base-*; do     # a bed that runs keeps the one it runs from
    [ "$old" = "$BASE" ] || grep -qs "lowerdir=$old," /proc/[0-9]*/mountinfo || rm -rf "$old"; done
}
make_repo() { # this machine downloads, the nodes install from the folder: no node needs a way out
  local t=$SECONDS d; log "filling the nodes' apt repository"
  d=$(mktemp -d "$CACHE/repo.XXXXXX"); mkdir -p "$d"/{up,wk,root}
  # shellcheck disable=SC2016,SC2046
  unshare --mount --propagation slave bash -c '
    set -euo pipefail; D=$1 BASE=$2 REPO=$3; shift 3
    mount -t overlay overlay -o "lowerdir=$BASE,upperdir=$D/up,workdir=$D/wk" "$D/root"
    rm -rf "$D/root/etc/apt"; cp -a "$D/root/usr/share/twin-apt" "$D/root/etc/apt"
    cp /etc/resolv.conf "$D/root/etc/resolv.conf"; mount --bind /dev "$D/root/dev"; mount -t proc proc "$D/root/proc"
    chroot "$D/root" apt-get -qq update
    chroot "$D/root" apt-get -qq -y --no-install-recommends --download-only install "$@" >/dev/null
    cp -n "$D"/root/var/cache/apt/archives/*.deb "$REPO/"
    cd "$REPO"; dpkg-scanpackages -m . /dev/null 2>/dev/null > Packages.new; mv Packages.new Packages; gzip -9kf Packages
  ' _ "$d" "$BASE" "$REPO" $(packages)
  rm -rf "$d"; repo_id > "$REPO/.id"; log "apt repository ready, $((SECONDS - t)) s"
}

# ---- disks, keys, connection files ----------------------------------------------------------------------------------
disks() { # a disk is what was written over the root file system that it was made for, and useless over another
  local n up uid
  if [ -e "$RUN/base" ] && [ "$(cat "$RUN/base")" != "$BASE" ]; then log "the root file system is a new one: new disks"; rm -rf "$RUN"; fi
  uid=$(stat -c %u "$BASE/home/ops"); mkdir -p "$RUN/cp"
  [ -e "$RUN/id_ed25519" ] || ssh-keygen -q -t ed25519 -N '' -C twin -f "$RUN/id_ed25519"
  for n in "${NODES[@]}"; do
    up=$RUN/$n/up; [ -e "$RUN/$n/made" ] && continue
    mkdir -p "$up/etc/ssh" "$up/srv/"{repo,wheels,models,twin} "$up/usr/local/"{bin,lib} "$RUN/$n/"{wk,root}
    ssh-keygen -q -t ed25519 -N '' -C "$n" -f "$up/etc/ssh/ssh_host_ed25519_key"
    echo "$n" > "$up/etc/hostname"; printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$n" > "$up/etc/hosts"
    install -m755 -t "$up/usr/local/bin" "$HERE"/standins/bin/*
    install -D -m755 "$HERE/standins.sh" "$up/usr/local/lib/twin/standins"
    cp -r "$HERE/standins/recorded" "$up/usr/local/lib/twin/recorded"
    install -d -m755 -o "$uid" -g "$uid" "$up/home/ops"; install -d -m700 -o "$uid" -g "$uid" "$up/home/ops/.ssh"
    install -m600 -o "$uid" -g "$uid" "$RUN/id_ed25519.pub" "$up/home/ops/.ssh/authorized_keys"
    cp "$HERE/standins/meminfo" "$RUN/$n/meminfo"; touch "$RUN/$n/made"
  done
  for n in "${NODES[@]}"; do echo "$n,${IP[$n]} $(cut -d' ' -f1,2 "$RUN/$n/up/etc/ssh/ssh_host_ed25519_key.pub")"; done > "$RUN/known_hosts"
  ssh_config > "$RUN/ssh_config"; connection > "$RUN/inventory.yml"; echo "$BASE" > "$RUN/base"
}
ssh_config() {
  local n; for n in "${NODES[@]}"; do printf 'Host %s %s\n  HostName %s\n  HostKeyAlias %s\n' "$n" "${IP[$n]}" "${IP[$n]}" "$n"; done
  # ProxyCommand: through the controller's namespace. With the bed down a connection fails there; it never leaves by
  # the default route. No -w: that is an idle limit too and would end long tasks.
  cat <<C
Host *
  User ops
  IdentityFile $RUN/id_ed25519
  IdentitiesOnly yes
  UserKnownHostsFile $RUN/known_hosts
  StrictHostKeyChecking yes
  ConnectTimeout 5
  ServerAliveInterval 2
  ServerAliveCountMax 3
  ControlMaster auto
  ControlPath $RUN/cp/%n
  ControlPersist 30
  ProxyCommand nsenter --net=/run/netns/$CTL nc %h %p
C
}
connection() { # for a bed other than the default one: ansible-playbook -i inventory/twin -i $TWIN_STATE/run/inventory.yml
  local n; printf -- '---\nall:\n  hosts:\n'
  for n in "${NODES[@]}"; do printf '    %s:\n      ansible_host: %s\n      ansible_ssh_common_args: -F %s/ssh_config\n      ansible_control_path_dir: %s/cp\n' "$n" "${IP[$n]}" "$RUN" "$RUN"; done
}

# ---- network --------------------------------------------------------------------------------------------------------
net() {
  local i; has_ns "$CTL" && return 0
  ip netns add "$CTL"; ip -n "$CTL" link set lo up
  ip -n "$CTL" link add br-mgmt type bridge; ip -n "$CTL" addr add "$NET.1/24" dev br-mgmt; ip -n "$CTL" link set br-mgmt up
  for i in "${CABLES[@]}"; do ip -n "$CTL" link add "br-cab$i" mtu 9216 type bridge; ip -n "$CTL" link set "br-cab$i" up; done
  # A cable answers for nobody: without this the controller would, and could be reached over it
  nsenter --net="/run/netns/$CTL" sh -c 'for f in /proc/sys/net/ipv4/conf/br-cab*/arp_ignore; do echo 1 > "$f"; done'
}
plug() { # a new namespace at every power-on: interfaces come up unconfigured
  local n=$1 k h i; k=$(ns "$n"); h=${IP[$n]##*.}; unplug "$n"
  ip netns add "$k"; ip -n "$k" link set lo up
  # The same MACs after a power cycle, or the peers' ARP caches go stale and the first connection takes a minute.
  ip -n "$CTL" link add "m-$n" type veth peer name eth0 address "02:77:00:00:00:$h" netns "$k"; ip -n "$CTL" link set "m-$n" master br-mgmt
  ip -n "$k" addr add "${IP[$n]}/24" dev eth0; ip -n "$k" link set eth0 up
  for i in 0 1; do
    ip -n "$CTL" link add "c$i-$n" mtu 9216 type veth peer name "${PORT1[$i]}" address "02:77:00:01:0$i:$h" netns "$k"
    ip -n "$CTL" link add "x$i-$n" mtu 9216 type veth peer name "${PORT0[$i]}" address "02:77:00:02:0$i:$h" netns "$k"
  done; carrier
}
unplug() { # or the node's kernel stack goes on answering pings after its last process
  local i; has_ns "$(ns "$1")" && ip netns del "$(ns "$1")"
  for i in m c0 c1 x0 x1; do ip -n "$CTL" link del "$i-$1" 2>/dev/null || true; done
}
ends() { # the cable in half I of port 1 and of port 0 of node number J: a name after br-cab, or - for none
  local n=$1 j=$2 i=$3 a b; a=$i b=-
  if [ -n "${TWIN_RING:-}" ]; then a=$j-$i b=$(((j + ${#NODES[@]} - 1) % ${#NODES[@]}))-$i; fi
  if [ -e "$RUN/swapped.$n" ]; then echo "$b $a"; else echo "$a $b"; fi
}
carrier() { # a link has carrier when its cable is whole and all its machines have power
  local n i j s c x side cable; local -A at=()
  for n in "${NODES[@]}"; do s=up; [ -e "$RUN/cut.mgmt:$n" ] && s=down; ip -n "$CTL" link set "m-$n" $s 2>/dev/null || true; done
  for i in 0 1; do for j in "${!NODES[@]}"; do n=${NODES[$j]}; read -r c x <<<"$(ends "$n" "$j" $i)"
    for side in "c$i-$n $c" "x$i-$n $x"; do at[${side#* }]+=" ${side% *}"; done; done; done
  for cable in "${!at[@]}"; do s=up; [ "$cable" != - ] && [ ! -e "$RUN/cut.cable$cable" ] || s=down
    [ ${#NODES[@]} -gt 2 ] && [ -z "${TWIN_RING:-}" ] ||      # a switch has power of its own
      for side in ${at[$cable]}; do [ -e "$RUN/${side#*-}/on" ] || s=down; done
    for side in ${at[$cable]}; do
      if [ "$cable" = - ]; then ip -n "$CTL" link set "$side" nomaster down 2>/dev/null || true
      else ip -n "$CTL" link set "$side" master "br-cab$cable" $s 2>/dev/null || true; fi; done; done
}

# ---- power ----------------------------------------------------------------------------------------------------------
running() { [ -d "$RUN/$1" ] && ! flock -n "$RUN/$1/lock" true; }   # the supervisor holds that lock while the node lives
start() { local n=$1; running "$n" && return 0; touch "$RUN/$n/on"; setsid "$SELF" _supervise "$n" </dev/null >"$RUN/$n/console.log" 2>&1 & disown; }
supervise() {
  local n=$1 rc fd
  # a lock that whoever started the bed holds must not live as long as the node; 255 is bash's own, this script
  for fd in /proc/$BASHPID/fd/*; do fd=${fd##*/}; [ "$fd" -le 2 ] || [ "$fd" = 255 ] || eval "exec $fd>&-"; done
  exec 9>"$RUN/$n/lock"; flock 9; touch "$RUN/$n/on"
  while :; do
    plug "$n"; rc=0
    # shellcheck disable=SC2016
    unshare --mount --propagation slave bash -c '
      set -euo pipefail; exec 9>&-
      N=$1 R=$2 BASE=$3 NS=$4 P=$5; shift 5; echo $$ > "$R/pid"
      mount -t cgroup2 none /sys/fs/cgroup                                    # private: nspawn sees a pure cgroup2 host
      mkdir -p "/sys/fs/cgroup/$P/$N"; echo $$ > "/sys/fs/cgroup/$P/$N/cgroup.procs"
      mkdir -p /run/systemd/nspawn; mount -t tmpfs none /run/systemd/nspawn   # nspawn refuses to clean one that is on a disk
      mount -t overlay overlay -o "lowerdir=$BASE,upperdir=$R/up,workdir=$R/wk" "$R/root"
      # /tmp stays on the disk: a tmpfs would take memory that the engine needs
      export SYSTEMD_NSPAWN_API_VFS_WRITABLE=network SYSTEMD_NSPAWN_LOCK=0 SYSTEMD_NSPAWN_TMPFS_TMP=0
      exec systemd-nspawn --boot --quiet --register=no --keep-unit --settings=no --machine="$N" --directory="$R/root" \
        --network-namespace-path="/run/netns/$NS" --capability=CAP_NET_ADMIN,CAP_IPC_LOCK \
        --console=pipe --link-journal=no --resolv-conf=off --timezone=off --kill-signal=SIGRTMIN+3 "$@"
    ' _ "$n" "$RUN/$n" "$BASE" "$(ns "$n")" "$P" \
      --bind-ro="$REPO:/srv/repo" --bind-ro="$WHEELS:/srv/wheels" --bind-ro="$MODELS:/srv/models" --bind-ro="$RUN/$n/meminfo:/srv/twin/meminfo" || rc=$?
    cg_clear "$n"; [ $rc = 133 ] && [ -e "$RUN/$n/on" ] || break      # 133: the node reboots itself
  done
  unplug "$n"; rm -f "$RUN/$n/on" "$RUN/$n/pid"; carrier
}
wait_ssh() {
  local n=$1 _
  for _ in $(seq 300); do
    # shellcheck disable=SC2016
    if nsenter --net="/run/netns/$CTL" timeout 2 bash -c 'exec 3<>"/dev/tcp/$0/22" && read -t 2 -u 3 l && [[ $l == SSH-* ]]' "${IP[$n]}" 2>/dev/null; then return 0; fi
    [ -e "$RUN/cut.mgmt:$n" ] && return 0
    [ -e "$RUN/$n/on" ] || { cat "$RUN/$n/console.log" >&2; die "$n ended while it booted; its console is above"; }
    sleep 0.1
  done; die "$n answers no ssh after 30 s; see $RUN/$n/console.log"
}
cg_clear() { local d=$CG/$P/$1 _; [ -d "$d" ] || return 0; { echo 1 > "$d/cgroup.kill"; } 2>/dev/null || true
  for _ in $(seq 50); do find "$d" -depth -type d -exec rmdir {} + 2>/dev/null || true; [ -d "$d" ] || return 0; sleep 0.1; done; }
gone() { flock -w "$2" "$RUN/$1/lock" true; }
stop() { local n=$1; running "$n" || { rm -f "$RUN/$n/on" "$RUN/$n/pid"; cg_clear "$n"; return 0; }
  rm -f "$RUN/$n/on"; kill -TERM "$(cat "$RUN/$n/pid")" 2>/dev/null || true; gone "$n" 20 || { cg_clear "$n"; gone "$n" 5; }; }
power_cut() { local i; running "$1" || return 0
  for i in m c0 c1 x0 x1; do ip -n "$CTL" link set "$i-$1" down; done   # links first: a dead machine sends no FIN
  rm -f "$RUN/$1/on"; cg_clear "$1"; gone "$1" 5; }
leader() { head -1 "$CG/$P/$1/payload/init.scope/cgroup.procs" 2>/dev/null || die "$1 is off"; }

up() { local n; ready
  for n in "${NODES[@]}"; do ! running "$n" || BASE=$(cat "$RUN/base"); done
  disks; net; for n in "${NODES[@]}"; do start "$n"; done; for n in "${NODES[@]}"; do wait_ssh "$n"; done; }
down() {
  local n p; for n in "${NODES[@]}"; do stop "$n" & done; wait
  if has_ns "$CTL"; then      # what still talks to the nodes: ssh's proxies, commands begun by `ctl`
    for p in $(ip netns pids "$CTL"); do [ "$p" = $$ ] || kill "$p" 2>/dev/null || true; done
    for n in "${NODES[@]}"; do unplug "$n"; done; ip netns del "$CTL"; fi
  rmdir "$CG/$P" 2>/dev/null || true
  # `ip netns add` leaves a mount behind; with no namespace in it, nobody's
  if mountpoint -q /run/netns && [ -z "$(ls /run/netns)" ]; then umount /run/netns; fi
  rm -rf "$RUN"/{cut,swapped}.* "$RUN"/cp/*
}
status() {
  local n l
  for n in "${NODES[@]}"; do if running "$n"; then echo "$n ${IP[$n]} up"; else echo "$n ${IP[$n]} off"; fi; done
  for l in "${LINKS[@]}"; do [ ! -e "$RUN/cut.$l" ] || echo "$l cut"; done
  if [ -e "$STATE/lock" ] && ! flock -n "$STATE/lock" true; then echo "in use by $(cat "$STATE/owner")"; fi
}

usage() { sed -n '/^#   twin.sh/,/^# TWIN_STATE/s/^# \{0,1\}//p' "$SELF"; exit 2; }
cmd=${1:-}; [ $# -gt 0 ] && shift
[ "$(id -u)" = 0 ] || [ -z "$cmd" ] || die "run as root: namespaces and mounts need it"
case $cmd in
  up|down|clean|start|stop|kill|reset|cut|mend|swap|meminfo) free_or_die;;
esac
case $cmd in
  start|stop|kill|reset|swap|meminfo|sh|_supervise) is_node "${1:-}";;
  cut|mend) is_link "${1:-}";;&
  cut|mend|swap) has_ns "$CTL" || die "the bed is down: 'twin.sh up' first";;
esac
case $cmd in
  start|reset|_supervise) BASE=$(cat "$RUN/base" 2>/dev/null) && [ -d "$BASE" ] || die "the bed is down: 'twin.sh up' first";;
esac
case $cmd in
  ready) ready;;
  up) up;;
  down) down;;
  clean) down; rm -rf "$RUN";;
  status) status;;
  start) has_ns "$CTL" || die "the bed is down: 'twin.sh up' first"; start "$1"; wait_ssh "$1";;
  stop) stop "$1";;
  kill) power_cut "$1";;
  reset) stop "$1"; rm -rf "${RUN:?}/$1"; disks;;
  cut) touch "$RUN/cut.$1"; carrier;;
  mend) rm -f "$RUN/cut.$1"; carrier;;
  swap) if [ -e "$RUN/swapped.$1" ]; then rm "$RUN/swapped.$1"; else touch "$RUN/swapped.$1"; fi; carrier;;
  meminfo) new=$(sed -E "s/^(MemAvailable: +)[0-9]+/\1$2/" "$RUN/$1/meminfo"); echo "$new" > "$RUN/$1/meminfo";;   # in place: the node has bound this very file
  sh) n=$1; shift; p=$(leader "$n"); exec nsenter -t "$p" -a -r -w -- "$@";;
  ctl) has_ns "$CTL" || die "the bed is down: 'twin.sh up' first"; exec nsenter --net="/run/netns/$CTL" -- "$@";;
  own) own "$@";;
  _supervise) supervise "$1";;
  *) usage;;
esac
