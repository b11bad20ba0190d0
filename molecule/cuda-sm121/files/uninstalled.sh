#!/bin/sh
# uninstalled.sh kept|gone: what has become of the weights. Ends at the first line that is not true.
set -eux
[ -z "$(apt-mark showhold)" ]
[ "$(sha256sum < /etc/fstab)" = "$(printf 'LABEL=root / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n' | sha256sum)" ]
[ "$(grep -c '^/swap.img ' /proc/swaps)" = 1 ]
[ "$(systemctl get-default)" = graphical.target ]
for package in g++ ninja-build python3.11-dev; do if dpkg -s $package; then exit 1; fi; done
for path in /usr/local/sbin/glm-vllm-drop-caches /usr/local/bin/glm-vllm /opt/glm-vllm /var/lib/glm-vllm/deployments \
  /etc/systemd/system/glm-vllm-watch.service /etc/systemd/system/multi-user.target.wants/glm-vllm-watch.service; do
  if [ -e $path ] || [ -L $path ]; then exit 1; fi
done
if grep 192.168.177.12 /etc/hosts || id glm-vllm || systemctl is-active glm-vllm-watch || nft list table inet glm_vllm_fabric; then exit 1; fi
# it has forgotten our site, and goes on
systemctl is-active nginx
[ "$(cat /srv/reloads)" = reload ]
case $1 in
  kept) [ "$(cat /var/lib/glm-vllm/models/tiny/model.safetensors)" = weights ];;
  gone) [ ! -e /var/lib/glm-vllm ];;
esac
