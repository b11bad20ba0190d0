#!/bin/sh
# Ends at the first line that is not true.
set -eux
[ "$(apt-mark showhold | xargs)" = "libnvidia-compute-580 nvidia-driver-580-open nvidia-modprobe" ]
[ "$(wc -l < /proc/swaps)" = 1 ]
grep -qx '#glm-vllm# /swap.img none swap sw 0 0' /etc/fstab
[ "$(stat -c '%U:%G %a' /usr/local/sbin/glm-vllm-drop-caches)" = "root:root 755" ]
/usr/local/sbin/glm-vllm-drop-caches
[ "$(cat /proc/sys/vm/drop_caches)" = 1 ]
printf '#include <Python.h>\nint main() { Py_Initialize(); }\n' > /tmp/t.cc
g++ -fsyntax-only -I/usr/include/python3.11 /tmp/t.cc
ninja --version
target=$(systemctl get-default)
if [ "$(hostname)" = spark-b ]; then [ "$target" = multi-user.target ]; else [ "$target" = graphical.target ]; fi
