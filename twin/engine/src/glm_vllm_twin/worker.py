"""The CPU worker that drafts with the architecture's MTP layer."""

from vllm.v1.worker.cpu_worker import CPUWorker

from glm_vllm_twin import proposer


class TwinWorker(CPUWorker):
    """vLLM's CPU worker; installs the proposer before the model runner chooses one."""

    def init_device(self) -> None:
        proposer.install()
        super().init_device()
