#!/bin/bash
# A stale Ray of ours, and another one that is none of our business.
set -euo pipefail
bin=/opt/glm-vllm/releases/old/venv/bin
mkdir -p $bin /var/lib/glm-vllm/ray/session_old/logs /etc/systemd/system/glm-vllm-head.service.wants /opt/other/bin
printf '#!/usr/bin/python3\nimport socket, sys, time\ns = socket.create_server(("127.0.0.1", int(sys.argv[2])))\ntime.sleep(3600)\n' > $bin/raylet
chmod 755 $bin/raylet
cp $bin/raylet /opt/other/bin/raylet
printf '[Service]\nExecStart=%s/raylet start 6379\n[Install]\nWantedBy=glm-vllm-head.service\n' $bin > /etc/systemd/system/ray-head.service
mkdir -p /etc/systemd/system/ray-head.service.d
printf '[Service]\nNice=1\n' > /etc/systemd/system/ray-head.service.d/override.conf
systemctl daemon-reload
systemctl enable --now --quiet ray-head.service
systemd-run --quiet --unit=stray $bin/raylet start 6380
systemctl is-active --quiet other || systemd-run --quiet --unit=other /opt/other/bin/raylet start 16379
