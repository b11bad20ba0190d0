#!/bin/sh
# A Spark as it leaves the factory, as far as the role looks at it. nvidia-smi is the bed's.
set -eu

# CUDA toolkit; nvcc itself is copied
home=/usr/local/cuda-13.0
mkdir -p $home/bin $home/include
echo 13.0 > $home/bin/VERSION
printf 'sm_120a\nsm_121\nsm_121a\n' > $home/bin/ARCHITECTURES
: > $home/include/cuda_runtime.h

# Driver packages, empty
cd "$(mktemp -d)"
for name in nvidia-driver-580-open libnvidia-compute-580 nvidia-modprobe linux-modules-nvidia-580-open-6.17; do
  mkdir -p "$name/DEBIAN"
  printf 'Package: %s\nVersion: 580.126.09\nArchitecture: all\nMaintainer: nobody\nDescription: empty\n' "$name" > "$name/DEBIAN/control"
  dpkg-deb --build "$name" > /dev/null
done
dpkg --install ./*.deb > /dev/null

# Swap. The kernel is another machine's, and so would its swap be: a file stands over /proc/swaps.
printf 'LABEL=root / ext4 defaults 0 1\n/swap.img none swap sw 0 0\n' > /etc/fstab
printf 'Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/swap.img                               file\t\t16777212\t0\t\t-2\n' > /srv/swaps
mount --bind /srv/swaps /proc/swaps
