#!/bin/bash
# foreign.sh HOST: the same rails as another tool sets them up.
set -euo pipefail
rm -f /etc/netplan/60-glm-vllm-cx7.yaml
cat > /etc/netplan/40-cx7.yaml <<Y
network:
  version: 2
  ethernets:
    enp1s0f1np1: {link-local: [], mtu: 9000, addresses: [192.168.100.$1/24]}
    enP2p1s0f1np1: {link-local: [], mtu: 9000, addresses: [192.168.101.$1/24]}
Y
chmod 600 /etc/netplan/40-cx7.yaml
sha256sum /etc/netplan/40-cx7.yaml > /root/foreign.sha256
netplan generate
networkctl reload
networkctl reconfigure enp1s0f1np1 enP2p1s0f1np1
for _ in $(seq 50); do
  ip -o address show dev enP2p1s0f1np1 | grep -q 192.168.101 && ip -o address show dev enp1s0f1np1 | grep -q 192.168.100 && exit 0
  sleep 0.2
done
exit 1
