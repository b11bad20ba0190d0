"""The CPU communicator with a truthful answer to "do all ranks share one /dev/shm?"."""

import os

import torch.distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class TwinCommunicator(CpuCommunicator):
    """Shared memory only between ranks that mount one /dev/shm; gloo over TCP otherwise.

    vLLM compares the names of the shared segments only, and its Ray executor gives ranks on two hosts the same name.
    """

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        same_name = super()._all_group_ranks_share_shm_group_name()
        mine = (os.uname().nodename, os.stat("/dev/shm").st_dev)
        everyone: list[tuple[str, int] | None] = [None] * self.world_size
        torch.distributed.all_gather_object(everyone, mine, group=self.device_group)
        return same_name and len(set(everyone)) == 1
