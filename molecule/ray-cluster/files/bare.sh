#!/bin/bash
set -euo pipefail
say() { echo "$*" >&2; exit 1; }
[ -z "$(find /etc/systemd -name 'ray-*')" ] || say "a unit file is left: $(find /etc/systemd -name 'ray-*')"
[ -z "$(ls -A /var/lib/glm-vllm/ray 2>/dev/null)" ] || say "a file of Ray is left"
[ "$(systemctl show --value --property=LoadState ray-head.service)" = not-found ] || say "systemd still knows ray-head"
! pgrep -f /opt/glm-vllm/releases/old/venv/bin/raylet >/dev/null || say "a process is left"
[ -z "$(ss -Hltn 'sport = :6379 or sport = :6380')" ] || say "a port is left"
systemctl is-active --quiet other || say "another Ray was ended"
