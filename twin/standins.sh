#!/bin/sh
# Inside a node of the twin, at boot, before systemd-sysctl.
set -eu
S=/run/twin-standins
mkdir -p $S/vm $S/fs

# 1. Kernel settings that have no namespace: writable copies, so that a sysctl task (or a write to drop_caches) takes
#    effect on this node alone and never on the machine it shares. A copy takes any value; the kernel would check it.
for k in vm fs; do
  (cd /proc/sys/$k && find . -path ./binfmt_misc -prune -o -type d -exec mkdir -p $S/$k/{} \; -o -type f -print) | while read -r f; do
    cat "/proc/sys/$k/$f" > "$S/$k/$f" 2>/dev/null || : > "$S/$k/$f"
  done
  mount --bind $S/$k /proc/sys/$k
done
for k in kernel/numa_balancing kernel/pid_max kernel/threads-max kernel/panic kernel/sched_rt_runtime_us kernel/perf_event_paranoid \
         kernel/kptr_restrict kernel/dmesg_restrict kernel/yama/ptrace_scope kernel/sysrq kernel/printk kernel/core_uses_pid kernel/core_pattern \
         net/core/rmem_max net/core/wmem_max net/core/rmem_default net/core/wmem_default net/core/optmem_max; do
  [ -e /proc/sys/$k ] || continue
  f=$S/$(echo $k | tr / .)
  cat /proc/sys/$k > "$f" 2>/dev/null || continue
  mount --bind "$f" /proc/sys/$k
done

# 2. The memory of a Spark. The file is the controller's (run/<node>/meminfo), so that a test can change it. Swap is the
#    machine's own, and not shown; the system call that would turn it off is one that nspawn does not let through.
mount --bind /srv/twin/meminfo /proc/meminfo
printf 'Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n' > $S/swaps
mount --bind $S/swaps /proc/swaps

# 3. What can be read about the ConnectX-7. Nothing is behind it: opening a uverbs device gives ENXIO, and a port's
#    state is the one it had at boot.
i=0
mkdir -p /dev/infiniband
for p in rocep1s0f0:enp1s0f0np0 rocep1s0f1:enp1s0f1np1 roceP2p1s0f0:enP2p1s0f0np0 roceP2p1s0f1:enP2p1s0f1np1; do
  hca=${p%%:*} netdev=${p#*:}
  d=$S/class/infiniband/$hca
  mkdir -p "$d/ports/1/gids" "$d/ports/1/gid_attrs/ndevs" "$d/ports/1/gid_attrs/types" "$d/device/net/$netdev"
  if [ "$(cat "/sys/class/net/$netdev/carrier" 2>/dev/null)" = 1 ]; then echo '4: ACTIVE'; else echo '1: DOWN'; fi > "$d/ports/1/state"
  echo '200 Gb/sec (4X HDR)' > "$d/ports/1/rate"
  echo Ethernet > "$d/ports/1/link_layer"
  for g in 0 1 2 3; do
    echo "$netdev" > "$d/ports/1/gid_attrs/ndevs/$g"
    echo 0000:0000:0000:0000:0000:0000:0000:0000 > "$d/ports/1/gids/$g" # a test writes one in place
  done
  echo 'RoCE v2' > "$d/ports/1/gid_attrs/types/3"
  mknod /dev/infiniband/uverbs$i c 231 $((192 + i))
  i=$((i + 1))
done
mknod /dev/infiniband/rdma_cm c 10 121
mount -t overlay overlay -o lowerdir=$S/class:/sys/class /sys/class
