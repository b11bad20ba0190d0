"""The one table of what `glm-vllm doctor` can find: every id, what it means, its severity, its fix and its detectors.

F01-F74 are faults seen on pairs of DGX Sparks, R1-R10 reports about the engine on them. An id never changes its
meaning and is never used again. `docs/network.md` shows this table; `make docs` writes it there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from glm_vllm_overlay.node import engine_checks, fabric_checks, measurements
from glm_vllm_overlay.node.evidence import Evidence
from glm_vllm_overlay.node.hits import LOGS, Detector, Hit, first, said
from glm_vllm_overlay.node.measurements import TCP_BUSBW, busbw

SEVERITIES = ("stop", "warn", "info")


@dataclass(frozen=True)
class Kind:
    """One id. `severity` holds unless a detector says otherwise (`when` tells in words).

    `node` detectors look at one node, `pair` detectors at all nodes of a folder together, `alone` detectors at a node
    whose peer is not known. With none of them the fault cannot be seen in a bundle, and `unseen` says where it is met.
    """

    id: str
    severity: str
    title: str
    fix: str
    node: tuple[Detector, ...] = ()
    pair: tuple[Callable[[list[Evidence]], Hit | None], ...] = ()
    alone: tuple[Detector, ...] = ()
    when: str = ""
    unseen: str = ""

    @property
    def detectable(self) -> bool:
        """Whether a bundle can show it."""
        return bool(self.node or self.pair or self.alone)


TABLE = (
    Kind(
        "F01",
        "stop",
        "The 13 Gb/s trap: a wedged port, or a rail below its floor",
        "Reboot both Sparks with the cable in; if that does not help, unplug power and cable of both for a minute.",
        (
            measurements.slow_rail,
            measurements.silent_wedge,
            measurements.busbw(
                measurements.TCP_BUSBW, measurements.SICK_BUSBW, "The collective reaches {0} GB/s: a rail is wedged."
            ),
        ),
    ),
    Kind(
        "F02",
        "stop",
        "No link on any port, or no ConnectX-7 at all",
        "Seat the QSFP cable in both Sparks and reboot both.",
        (fabric_checks.no_port, fabric_checks.no_link),
    ),
    Kind(
        "F03",
        "warn",
        "Only one of the two functions behind the cable is used",
        "Give both functions of the port an address of its own, in two subnets: run playbooks/network.yml.",
        (
            fabric_checks.lone_twin,
            fabric_checks.bonded,
            fabric_checks.one_hca_in_log,
            measurements.busbw(
                measurements.SICK_BUSBW,
                measurements.ONE_RAIL_BUSBW,
                "The collective reaches {0} GB/s: one rail's worth.",
            ),
        ),
    ),
    Kind(
        "F04",
        "warn",
        "The cable is in different sockets on the nodes",
        "Nothing to mend here; never copy an interface name from one node to the other.",
        pair=(fabric_checks.other_ports,),
    ),
    Kind(
        "F05",
        "info",
        "Device names and line order differ between machines",
        "Read by pattern and pair by hardware, as `glm-vllm fabric` does.",
        unseen="no fault of a node; every order and name is read",
    ),
    Kind(
        "F06",
        "warn",
        "Two cables",
        "Take one out: one cable fills the chip's PCIe lanes. (Three nodes in a ring need both sockets.)",
        (fabric_checks.two_cables,),
    ),
    Kind(
        "F07",
        "warn",
        "Old firmware wires a function with two PCIe lanes",
        "Update the firmware with `fwupdmgr update` and reboot.",
        (
            fabric_checks.narrow,
            said("LnkSta:", "A function of the ConnectX-7 has two PCIe lanes.", r"LnkSta:.*Width x[12]\b"),
            said(
                "available PCIe bandwidth",
                "A function of the ConnectX-7 has two PCIe lanes.",
                fabric_checks.PLACE + r".*available PCIe bandwidth.*PCIe x[12] link",
            ),
        ),
    ),
    Kind(
        "F08",
        "warn",
        "A measurement that printed no number",
        "Run ib_write_bw again with the right device and GID index; never use ibhosts or iblinkinfo on RoCE.",
        (
            measurements.no_row,
            said("UMAD port", "A tool for InfiniBand was used on RoCE.", files=(*LOGS, "ib_write_bw.txt")),
        ),
    ),
    Kind(
        "F09",
        "warn",
        "PCIe errors of the ConnectX-7",
        "Save the journal, power both Sparks off and on; if it comes back, have the unit exchanged.",
        (
            said(
                "AER",
                "The kernel reports PCIe errors of the ConnectX-7.",
                rf"AER:?.*{fabric_checks.PLACE}|{fabric_checks.PLACE}.*\bAER\b",
                files=("journal.txt",),
            ),
            said(
                "PCIe Bus Error",
                "The kernel reports PCIe errors of the ConnectX-7.",
                fabric_checks.PLACE,
                files=("journal.txt",),
            ),
        ),
    ),
    Kind(
        "F10",
        "stop",
        "A rail's address has no RoCE v2 GID",
        "Give the rail its address, or take the interface down and up; the index is found anew at each start.",
        (
            fabric_checks.no_gid,
            fabric_checks.pinned_empty,
            said("ibv_modify_qp", "A queue pair met an empty GID.", r"ibv_modify_qp.*(No data available|\b61\b)"),
            said("is EMPTY", "A GID index is empty.", r"GID index \d+ is EMPTY"),
        ),
    ),
    Kind(
        "F11",
        "stop",
        "The GID index is not the usual one",
        "Pin no index; keep `link-local: []` or `ipv6.addr-gen-mode eui64` so that it stays.",
        (fabric_checks.shifted,),
        when="stop when another index is pinned, info otherwise",
    ),
    Kind(
        "F12",
        "stop",
        "GID indices differ between nodes, or drift while running",
        "Resolve the index on each node at each start, as `glm-vllm fabric` does; pin none in an inventory.",
        pair=(fabric_checks.other_indices,),
        when="stop when an index is pinned that is not the node's own, info otherwise",
    ),
    Kind(
        "F13",
        "stop",
        "NCCL_IB_GID_INDEX is empty, which reads as 0",
        "Leave the variable out where it has no value.",
        (
            said(
                "NCCL_IB_GID_INDEX",
                "NCCL_IB_GID_INDEX is empty or 0, which is a link-local RoCE v1 entry.",
                fabric_checks.EMPTY.pattern,
            ),
        ),
    ),
    Kind(
        "F14",
        "stop",
        "Rails whose addresses collide: two in one subnet, or one address twice",
        "Give each rail a subnet of its own and each node its own addresses: run playbooks/network.yml.",
        (fabric_checks.shared_subnet, fabric_checks.held_twice),
        pair=(fabric_checks.same_address,),
        when="warn when both rails of a shared subnet pass the floor",
    ),
    Kind(
        "F15",
        "stop",
        "The rails have lost their addresses",
        "Put the addresses into a netplan file of mode 0600: run playbooks/network.yml.",
        (fabric_checks.no_address,),
    ),
    Kind(
        "F16",
        "stop",
        "Two netplan files give one port addresses",
        "Keep one netplan file that names these ports; playbooks/network.yml adopts it.",
        (fabric_checks.two_files,),
    ),
    Kind(
        "F17",
        "stop",
        "`netplan apply` would fail, or cut the management connection",
        "Mend or remove the file that netplan refuses; never call `netplan apply` on a node that you reach over WiFi.",
        (fabric_checks.broken_file, fabric_checks.wifi_managed),
        when="stop for a file that netplan cannot read, info for a node that is managed over WiFi",
    ),
    Kind(
        "F18",
        "stop",
        "MTUs differ, or fell back to 1500",
        "Set the same MTU on both rails of both nodes, in netplan: 9000 on a direct cable.",
        (
            fabric_checks.unequal_twins,
            said("IBV_WC_LOC_LEN_ERR", "A message did not fit: the ends of a rail have different MTUs."),
        ),
        pair=(fabric_checks.unequal_mtu,),
        when="warn for an equal 1500 (it costs about 3 % of an all-reduce)",
    ),
    Kind(
        "F19",
        "warn",
        "A neighbour on a rail does not answer, or did not in time",
        "Ping the peer on every rail, then try once more.",
        (
            fabric_checks.silent_rail,
            said("IBV_WC_RETRY_EXC_ERR", "RoCE gave up before the peer's address was resolved."),
        ),
    ),
    Kind(
        "F20",
        "info",
        "iproute2 6.1 leaves fields out of its JSON",
        "Take the device from the question, and the source from prefsrc, src or from.",
        unseen="no fault of a node; both shapes are read",
    ),
    Kind(
        "F21",
        "stop",
        "A firewall drops RoCE or the meeting of the ranks",
        "Let everything from the peer in, on the rails and from its management address.",
        (
            fabric_checks.firewalled,
            said("A daemon failed to report back", "The ranks could not reach each other: a firewall is in the way."),
        ),
    ),
    Kind(
        "F22",
        "info",
        "RDMA traffic does not show in the interface's counters",
        "Read /sys/class/infiniband/*/ports/1/counters.",
        unseen="a reading mistake, no state of a node",
    ),
    Kind(
        "F23",
        "stop",
        "A variable names the wrong interface",
        "Let `glm-vllm fabric` write the interface of each node; never share it between nodes.",
        (
            engine_checks.wrong_interface,
            said(
                "Unable to find address for",
                "Gloo was told to use {0}, which has no address here.",
                r"Unable to find address for: (\S+)",
            ),
        ),
    ),
    Kind(
        "F24",
        "stop",
        "The host name resolves to a loopback address",
        "Remove the line from /etc/hosts (playbooks/network.yml does) and set GLOO_SOCKET_IFNAME.",
        (
            engine_checks.loopback_name,
            said("Using the loopback address as fallback", "Gloo took the loopback address."),
            said(
                "connectFullMesh failed",
                "Gloo was given a loopback address.",
                r"connectFullMesh failed.*127\.0\.[01]\.1",
            ),
        ),
    ),
    Kind(
        "F25",
        "stop",
        "NCCL fell back to TCP",
        "Give the engine /dev/infiniband and libibverbs, and set NCCL_NET=IB so that this fails aloud.",
        (
            engine_checks.tcp_fallback,
            busbw(0.0, TCP_BUSBW, "The collective reaches {0} GB/s, which is TCP."),
        ),
    ),
    Kind(
        "F26",
        "stop",
        "The process may not lock enough memory",
        "Set LimitMEMLOCK=infinity in the unit, on both nodes.",
        (engine_checks.low_memlock, engine_checks.no_lock),
    ),
    Kind("F27", "warn", "Kernel 7.0 strands memory in CMA", "Boot with `kho=off`.", (engine_checks.stranded_cma,)),
    Kind(
        "F28",
        "warn",
        "nccl-tests without MPI measures nothing",
        "Build nccl-tests with `make MPI=1` and look for two ranks in its output.",
        (measurements.worlds_of_one,),
    ),
    Kind(
        "F29",
        "stop",
        "A 16 GB collective freezes a node that is short of memory",
        "Use 1 to 4 GB, or free 48 GiB first.",
        (measurements.huge_collective,),
    ),
    Kind(
        "F30",
        "warn",
        "Too little memory is free for a start",
        "Drop the page cache just before the start, as `glm-vllm gate` does, and stop what holds the rest.",
        (
            engine_checks.memory_gate,
            said(
                "on startup is less than",
                "The engine found {0} GiB free and wanted {1}.",
                engine_checks.FREE_MEMORY.pattern,
            ),
        ),
        when="warn throughout: MemAvailable decides, and the gate checks it",
    ),
    Kind(
        "F31",
        "info",
        "A restart before the last engine gave its memory back",
        "Wait until 90 GiB are free on both nodes.",
        (engine_checks.restart_race,),
    ),
    Kind(
        "F32",
        "stop",
        "The loader dies after a large copy",
        "Run `sync` after a copy and before the load; `glm-vllm gate` then drops the page cache at each start.",
        (
            said(
                "exceeds device memory budget",
                "The loader's buffer did not fit.",
                r"buffer_size \(\d+ B\) exceeds device memory budget",
            ),
        ),
    ),
    Kind(
        "F33",
        "stop",
        "The host runs out of memory and locks up",
        "Turn swap off, keep 4 GiB available, boot without a desktop, keep glm-vllm-guard running.",
        (
            said("NV_ERR_NO_MEMORY", "The GPU driver could not allocate memory."),
            said("oom-kill:", "The kernel killed a process for memory.", r"oom-kill:constraint=CONSTRAINT_NONE"),
            said("Out of memory: Killed process", "The kernel killed a process for memory."),
            engine_checks.swap,
        ),
        when="warn when no more than swap is at fault",
    ),
    Kind(
        "F34",
        "info",
        "earlyoom takes the engine for a runaway",
        "Turn earlyoom off; glm-vllm-guard is the only killer.",
        (said("earlyoom", "earlyoom runs on this node.", r"earlyoom(?:\[|\.service|: )", files=("journal.txt",)),),
    ),
    Kind(
        "F35",
        "stop",
        "The context does not fit into the KV cache",
        "Lower max_model_len, or give more KV bytes.",
        (said("To serve at least one request with the model", "The context is longer than the KV cache."),),
    ),
    Kind(
        "F36",
        "warn",
        "Explicit KV bytes bypass the memory check",
        "Keep utilisation and KV bytes together, and 4 GiB available after the load.",
        (engine_checks.explicit_bytes,),
        when="found only where less than 4 GiB are available, or that is not known",
    ),
    Kind(
        "F37",
        "warn",
        "Ray takes the wrong address",
        "Give Ray `--node-ip-address` and VLLM_HOST_IP.",
        (
            said(
                "No available node types can fulfill",
                "Ray knows no node of that address.",
                r"fulfill resource request.*node:",
            ),
            said("Every node should have a unique IP address", "Ray sees one address twice."),
        ),
    ),
    Kind(
        "F38",
        "warn",
        "Versions differ between nodes",
        "Run the same release on both nodes: site.yml copies it.",
        (said("Version mismatch: The cluster was started with", "Ray's versions differ between the nodes."),),
    ),
    Kind(
        "F39",
        "warn",
        "The ranks wait for each other",
        "Look at power: near idle with a busy GPU is a deadlock; restart the pair, and compare both ranks' settings.",
        (engine_checks.hang_at_init, engine_checks.idle_power),
    ),
    Kind(
        "F40",
        "stop",
        "An argument that this engine does not know",
        "Run `glm-vllm check-config` before the old engine is stopped.",
        (
            said(
                "unrecognized arguments:",
                "The engine does not know {0}.",
                r"unrecognized arguments: (.+)",
                ("engine.log",),
            ),
        ),
    ),
    Kind(
        "F41",
        "stop",
        "Triton's ptxas is too old for sm_121a",
        "Set TRITON_PTXAS_PATH to CUDA 13's ptxas.",
        (
            said(
                "is not defined for option 'gpu-name'",
                "ptxas does not know this GPU.",
                r"sm_12\w+' is not defined for option",
            ),
        ),
    ),
    Kind(
        "F42",
        "stop",
        "FlashInfer finds no architecture to compile for",
        "Use CUDA 12.9 or newer and clear FlashInfer's cache.",
        (said("No supported CUDA architectures found", "FlashInfer finds no architecture to compile for."),),
    ),
    Kind(
        "F43",
        "warn",
        "Kernels cached for another shape",
        "Key the cache by release and shape.",
        unseen="shows as a low acceptance rate only; the cache folders carry release and shape in their names",
    ),
    Kind(
        "F44",
        "stop",
        "A wheel for another CUDA or GPU",
        "Install the locked wheels only.",
        (
            said(
                "libcudart.so.12", "A wheel for CUDA 12 is installed.", r"libcudart\.so\.12: cannot open shared object"
            ),
            said("no kernel image is available for execution", "A wheel without kernels for this GPU is installed."),
        ),
    ),
    Kind(
        "F45",
        "warn",
        "A driver outside branch 580, or another one than the peer's",
        "Keep branch 580 on both nodes, held with `apt-mark hold`, nvidia-modprobe too.",
        (
            engine_checks.driver_branch,
            said("This container was built for NVIDIA Driver Release", "An image wants a newer driver than this."),
        ),
        pair=(engine_checks.other_driver,),
    ),
    Kind(
        "F46",
        "stop",
        "Driver and library do not match until a reboot",
        "Reboot the node.",
        (
            said(
                "Driver/library version mismatch",
                "The GPU driver was updated and the old one is still loaded.",
                files=("nvidia-smi.csv", "nvidia-smi-table.txt", *LOGS),
            ),
        ),
    ),
    Kind(
        "F47",
        "warn",
        "Containers lose the GPU on daemon-reload",
        "Restart the pair after a daemon-reload, and reload only when a unit has changed.",
        (
            said(
                "Failed to initialize NVML: Unknown Error",
                "A process lost the GPU.",
                files=("nvidia-smi.csv", "nvidia-smi-table.txt", *LOGS),
            ),
        ),
    ),
    Kind(
        "F48",
        "warn",
        "`docker load` of an image for several platforms",
        "Save it with `docker save --platform linux/arm64`.",
        (
            said(
                "docker-import-",
                "docker load misses a part of the image.",
                r"docker-import-.*no such file or directory",
            ),
        ),
    ),
    Kind(
        "F49",
        "warn",
        "BuildKit asks the network for a local image",
        "Name the image without its digest when building offline.",
        (said("failed to resolve source metadata", "BuildKit asked the network for an image."),),
    ),
    Kind(
        "F50",
        "warn",
        "Docker has lost its NVIDIA runtime",
        "Run `nvidia-ctk runtime configure`, and merge daemon.json instead of replacing it.",
        (
            said("unknown or invalid runtime name: nvidia", "Docker does not know the NVIDIA runtime."),
            said(
                "could not select device driver",
                "Docker has no driver for GPUs.",
                r"device driver .*capabilities: \[\[gpu\]\]",
            ),
        ),
    ),
    Kind(
        "F51",
        "warn",
        "A download through Xet stalls",
        "Set HF_HUB_DISABLE_XET=1 and resume.",
        (
            said(
                "Downloading (incomplete total",
                "A download has stalled.",
                r"Downloading \(incomplete total.*\b9\d%.*\b\d+(?:\.\d+)?kB/s",
            ),
        ),
    ),
    Kind(
        "F52",
        "warn",
        "A download that says it is complete and is not",
        "Run playbooks/weights.yml: it compares every byte with the manifest.",
        (said("Download complete:", "A download ended with nothing.", r"Download complete: : \| 0\.00B"),),
    ),
    Kind(
        "F53",
        "stop",
        "A truncated shard",
        "Run playbooks/weights.yml: it compares every byte with the manifest and fetches what differs.",
        (
            said("MetadataIncompleteBuffer", "A shard is shorter than its header says."),
            said("file not fully covered", "A shard is shorter than its header says."),
        ),
    ),
    Kind(
        "F54",
        "stop",
        "Shards counted across snapshots",
        "Run playbooks/weights.yml.",
        unseen="needs the folders of the weights; playbooks/weights.yml compares them with the manifest",
    ),
    Kind(
        "F55",
        "stop",
        "A copy to the peer that shipped links",
        "Run playbooks/weights.yml: it verifies at the far end.",
        unseen="needs the folders of the weights; playbooks/weights.yml verifies them on both nodes",
    ),
    Kind(
        "F56",
        "warn",
        "A free-space check that counts what is there already",
        "Run playbooks/weights.yml, which counts only what is missing.",
        unseen="needs the file system; playbooks/weights.yml looks before it writes",
    ),
    Kind(
        "F57",
        "info",
        "A copy over the wrong link",
        "Copy over the rail's address.",
        unseen="needs a copy in progress; playbooks/weights.yml names the rail",
    ),
    Kind(
        "F58",
        "warn",
        "`hf` is not found, or its cache belongs to root",
        "Use playbooks/weights.yml, which needs neither.",
        (said("neither hf nor huggingface-cli found", "The download tool is not installed."),),
    ),
    Kind(
        "F59",
        "warn",
        "Not back after a reboot",
        "Use units that can be started again: playbooks/serve.yml writes them.",
        (said("container already exists for project", "A leftover container blocks the start."),),
    ),
    Kind(
        "F60",
        "warn",
        "A unit starts before the link is there",
        "Wait for carrier, address and GID in the start step, as `glm-vllm gate` does.",
        unseen="an order of events; the gate waits for them",
    ),
    Kind(
        "F61",
        "warn",
        "SSH between the nodes fails",
        "Keep a known_hosts file of the pair; after a reflash, remove the old key from it.",
        (
            said("Host key verification failed", "SSH refused the peer's host key."),
            said("REMOTE HOST IDENTIFICATION HAS CHANGED", "The peer's host key has changed."),
            said("avahi-browse not found", "avahi-utils is not installed."),
        ),
    ),
    Kind(
        "F62",
        "warn",
        "An SSH port other than 22 on Ubuntu 24.04",
        "Set it in ssh.socket.",
        unseen="needs the SSH configuration, which no bundle holds",
    ),
    Kind(
        "F63",
        "info",
        "Check mode and units that are not there yet",
        "Start nothing in check mode.",
        unseen="met on the controller",
    ),
    Kind(
        "F64",
        "warn",
        "pip refuses to install into the system",
        "Use a virtual environment.",
        (said("externally-managed-environment", "pip was run outside a virtual environment."),),
    ),
    Kind(
        "F65",
        "info",
        "A vault password file that is not there",
        "Name none until there is one.",
        unseen="met on the controller",
    ),
    Kind(
        "F66",
        "info",
        "Tags that run nothing",
        "Use import_role, or apply the tags.",
        unseen="met on the controller",
    ),
    Kind(
        "F67",
        "info",
        "`df -P --output` is no valid call",
        "Leave -P out.",
        unseen="met on the controller",
    ),
    Kind(
        "F68",
        "info",
        "Ansible hangs when the network restarts",
        "Run the change detached and come back with a new connection.",
        unseen="met on the controller",
    ),
    Kind(
        "F69",
        "info",
        "nvidia-smi shows no memory figure, or no GPU",
        "Read /proc/meminfo; where the GPU itself is missing, reboot and look for NVRM lines in the journal.",
        (engine_checks.no_memory_figure,),
        when="stop when no GPU is found, warn when it has no name",
    ),
    Kind(
        "F70",
        "info",
        "DCGM has no memory fields",
        "Use utilisation, temperature, power and SM clock.",
        unseen="needs DCGM, which no bundle holds",
    ),
    Kind(
        "F71",
        "warn",
        "The GPU is stuck at a low clock",
        "Power the Spark off and unplug it; a reboot does not clear it.",
        (engine_checks.idle_power,),
        when="a table without clocks cannot tell it from F39, so both are named",
    ),
    Kind(
        "F72",
        "info",
        "dgx-release: several updates, a serial number",
        "Take the last DGX_OTA_VERSION, and remove the serial number before you share the file.",
        (engine_checks.release_file,),
    ),
    Kind(
        "F73",
        "stop",
        "A Spark with too little memory",
        "Use two 128 GB Sparks.",
        (engine_checks.small_spark,),
    ),
    Kind(
        "F74",
        "warn",
        "Clocks differ between nodes",
        "Turn time synchronisation on.",
        unseen="a bundle holds no time that both nodes took at once",
    ),
    Kind(
        "R1",
        "stop",
        "FlashInfer's autotuner deadlocks the pair",
        "Keep glm_vllm_overlay_flashinfer_autotune: false.",
        pair=(engine_checks.tuning_apart,),
        alone=(engine_checks.tuning,),
    ),
    Kind(
        "R2",
        "stop",
        "Ray kills the worker at 95 % of unified memory",
        "Set RAY_memory_monitor_refresh_ms=0, as role ray-cluster does, or use executor mp.",
        (said("ray.exceptions.OutOfMemoryError", "Ray killed a worker for memory."),),
    ),
    Kind(
        "R3",
        "stop",
        "A Ray worker dies at the start and the endpoint stays up",
        "Use executor mp.",
        (said("RayWorkerProc", "A Ray worker died.", r"RayWorkerProc rank=\[?\d+\]? died"),),
    ),
    Kind(
        "R4",
        "stop",
        "Compiling kernels exhausts memory",
        "Compile on an empty node with MAX_JOBS=1 to 8: `glm-vllm build` does.",
        (
            first(
                said(
                    "oom-kill:",
                    "The compiler was killed for memory.",
                    r"task=(?:cicc|ptxas|nvcc|cudafe\+\+|cc1plus|ninja)\b",
                ),
                said(
                    "of memory: Killed process",
                    "The compiler was killed for memory.",
                    r"Killed process \d+ \((?:cicc|ptxas|nvcc|cudafe\+\+|cc1plus|ninja)\)",
                ),
                said("nvcc", "The compiler was killed for memory.", r"nvcc.*(?:Killed|signal 9|137)"),
            ),
        ),
    ),
    Kind(
        "R5",
        "warn",
        "Kernels are compiled while the engine serves",
        "Run the warm-up over all shapes before traffic is let in.",
        (said("during inference", "A kernel was compiled while serving.", r"(?i)JIT(?: compil\w+)? during inference"),),
    ),
    Kind(
        "R6",
        "warn",
        "Freezes although the KV cache has a fixed size",
        "Keep 4 GiB available after the load.",
        unseen="shows as F36 and F33",
    ),
    Kind(
        "R7",
        "stop",
        "Illegal memory access",
        "Save journal and engine log, restart the pair.",
        (said("an illegal memory access was encountered", "A kernel read or wrote outside its memory."),),
    ),
    Kind(
        "R8",
        "stop",
        "GPU faults (Xid 31, 43) or wrong text under cache churn",
        "Save journal and engine log, restart the pair, and check its answers.",
        (said("Xid", "The GPU reports Xid {0}.", r"NVRM: Xid \([^)]*\): (31|43)\b"),),
    ),
    Kind(
        "R9",
        "warn",
        "No prefix is ever found in the cache with speculation on",
        "Use dflash2 rather than mtp, and send one prompt twice: the second must hit.",
        (engine_checks.no_prefix_hits,),
    ),
    Kind(
        "R10",
        "warn",
        "KV caches of different sizes on the ranks",
        "Give both nodes the same serve.yaml: run playbooks/serve.yml.",
        pair=(engine_checks.unequal_cache,),
    ),
)
