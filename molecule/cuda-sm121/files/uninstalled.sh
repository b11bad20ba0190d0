#!/bin/sh
# Ends at the first line that is not true.
set -eux
[ -z "$(apt-mark showhold)" ]
[ "$(sha256sum < /etc/fstab)" = "$(printf 'LABEL=root / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n' | sha256sum)" ]
[ ! -e /usr/local/sbin/glm-vllm-drop-caches ]
for package in g++ ninja-build python3.11-dev; do if dpkg -s $package; then exit 1; fi; done
[ ! -e /var/lib/glm-vllm ]
grep -q '^/swap.img ' /proc/swaps
[ "$(systemctl get-default)" = graphical.target ]
