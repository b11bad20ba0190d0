#!/bin/bash
# rails.sh HOST: the rails of a node as the role leaves them; ends with 1 and a sentence when one is not so.
set -euo pipefail
host=$1 peer=$2
say() { echo "$*" >&2; exit 1; }
has() { ip -j address show dev "$1" | grep -q "\"local\":\"$2\",\"prefixlen\":24" || say "$1 does not carry $2/24"; }
n=0
for rail in enp1s0f1np1:192.168.177 enP2p1s0f1np1:192.168.178; do
  dev=${rail%:*} net=${rail#*:}
  has "$dev" "$net.$host"
  [ "$(cat "/sys/class/net/$dev/mtu")" = 9000 ] || say "$dev has MTU $(cat "/sys/class/net/$dev/mtu")"
  for _ in 1 2 3 4 5 6 7 8 9 10; do ping -c1 -W1 -q "$net.$peer" >/dev/null && break; done # the peer may still boot
  ping -c2 -i0.2 -W1 -Mdo -s8972 -q "$net.$peer" >/dev/null || say "$net.$peer does not answer a full frame"
  ping -c1 -W1 -Mdo -s8973 -q "$net.$peer" >/dev/null 2>&1 && say "a frame above MTU 9000 passed whole"
  n=$((n + 1))
done
[ "$n" = 2 ]
[ "$(stat -c '%a %U' /etc/netplan/60-glm-vllm-cx7.yaml)" = '600 root' ] || say "netplan file: mode"
for dev in enp1s0f0np0 enP2p1s0f0np0; do # the port without a cable is as it was found
  ip -j link show dev "$dev" | grep -q '"UP"' && say "$dev was left up"
done
[ -z "$(ip -j address show dev eth0 | grep -o '192\.168\.17[78]' || true)" ] || say "eth0 has an address of the fabric"
grep -qE '^127\.0\.1\.' /etc/hosts && say "/etc/hosts names this node with a loopback address"
[ "$(getent hosts "$(hostname)" | awk '{print $1}')" = "192.168.177.$host" ] || say "the own name is not on the fabric"
nft list table inet glm_vllm_fabric >/dev/null || say "the firewall is not there"
systemctl is-enabled --quiet glm-vllm-firewall || say "the firewall is not enabled"
timeout 20 systemctl start network-online.target || say "network-online.target is not reached"
