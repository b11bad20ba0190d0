#!/bin/sh
# One of each kind that other roles record.
set -eu
useradd --system --home-dir /var/lib/glm-vllm --shell /usr/sbin/nologin glm-vllm
printf '[Service]\nExecStart=/usr/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n' > /etc/systemd/system/glm-vllm-watch.service
systemctl enable --now glm-vllm-watch.service
nft add table inet glm_vllm_fabric
mkdir -p /opt/glm-vllm/releases /var/lib/glm-vllm/models/tiny /var/lib/glm-vllm/deployments
echo weights > /var/lib/glm-vllm/models/tiny/model.safetensors
ln -s /opt/glm-vllm/releases/1/venv/bin/glm-vllm /usr/local/bin/glm-vllm
echo '192.168.177.12 spark-b' >> /etc/hosts
