"""Which vLLM each of our hooks was written for: the only module that knows versions.

FILES holds, for each version, the files of vLLM that a hook relies on beyond vLLM's documented interfaces, with their
SHA-256 and the hooks that rely on them. `require` refuses when the version or one of the files is another one, before
the hook touches anything.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

from glm_vllm_overlay.node.errors import Refusal, Unusable

FILES: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    # The twin's.
    "0.32.0": {
        "model_executor/model_loader/base_loader.py": (
            "cba765f6e669c51834ea5ac4146d5de9648635cfbc00c987601009865e869b36",
            ("ablation",),
        ),
        "v1/core/sched/async_scheduler.py": (
            "38d296e77e4d612e696241c67298eb1ca9b6a48b483cd33d35495bf31691032e",
            ("scheduler",),
        ),
        "v1/core/sched/scheduler.py": (
            "d9a39870286c424cef2fc0730e24092ee3df67e848608e2278944846bab804ae",
            ("scheduler",),
        ),
    },
    "0.33.0": {
        "model_executor/layers/attention/attention.py": (
            "3914b60f5407d193cfd1cbe75c6689a6da71f89e37d177a04bb0d95b3244ea44",
            ("plan",),
        ),
        "model_executor/layers/attention/mla_attention.py": (
            "af3300b09fda788591861cff8f59ef2d41b02f17164763647d75f33330406f0d",
            ("plan", "startup"),
        ),
        "model_executor/layers/mamba/abstract.py": (
            "08506d9dc3e1a58d42a72cb80c81e32a51d4bda7f7be2551d355db19a0d02f9d",
            ("plan",),
        ),
        "model_executor/model_loader/base_loader.py": (
            "cba765f6e669c51834ea5ac4146d5de9648635cfbc00c987601009865e869b36",
            ("ablation", "startup"),
        ),
        "model_executor/models/deepseek_v2.py": (
            "96f4f755f62caa85869fb884209e7f8869882ddb6efbd40c930778b27bd3e39d",
            ("plan",),
        ),
        "model_executor/models/qwen3_dflash.py": (
            "2f3b8ea98345f06a30d41596d0b6b738049f483fbc8961b9267d7ba771bb658d",
            ("plan",),
        ),
        "models/glm5next/common/attention.py": (
            "e83364215dccc2871e47906a8a5286852bd6a922a6a322394ff8f27db80952e0",
            ("plan",),
        ),
        "models/glm5next/common/kda.py": (
            "cc89b4a0b08860fad2f0558ad85a9082fda400188583fb55a62db64e61ec2d94",
            ("plan",),
        ),
        "platforms/interface.py": (
            "11f06cfa184fa7380177eaf26bca58c421306f0eea273c9f35519d35ff4a6f75",
            ("plan",),
        ),
        "v1/attention/backends/flash_attn.py": (
            "7991393d7895994550028637790145d03d1fe28586cac03aa2946ba13afc99c5",
            ("plan",),
        ),
        "v1/attention/backends/mla/flashinfer_mla_sparse.py": (
            "8750f5fb8c64b92ed1f59c522b2cba6aa4cf255480cd70b49ca07152a15cc485",
            ("plan",),
        ),
        "v1/attention/backends/mla/indexer.py": (
            "6457fb5a755ca53addce7731cb56770493371ad9f3728251e7ff33515b67965c",
            ("plan",),
        ),
        "v1/core/kv_cache_config_builder.py": (
            "6700f3fb8282d78afda45abfec17586b056369be70c134b98fe74b775b579817",
            ("cache", "plan"),
        ),
        "v1/core/kv_cache_planning.py": (
            "b3c200004a57b1da274127ad267af2c3e6349b94c7543e4ef5a39cfddc74f722",
            ("cache", "plan"),
        ),
        "v1/core/sched/async_scheduler.py": (
            "e67b0005e481f614d4cc3859c0f1e345761941c61dfac7bd75223c6b5141acce",
            ("scheduler",),
        ),
        "v1/core/sched/scheduler.py": (
            "d76cc22257550972137df9c893505d0bd0f5d482374691e6eca4372772de501a",
            ("scheduler",),
        ),
        "v1/kv_cache_interface.py": (
            "1e0b5027cc13ed845488ff3f671292e6c57fcae99c5b7130ad92c9d176a38684",
            ("plan",),
        ),
        "v1/worker/gpu/attn_utils.py": (
            "705a1eb16d26dc0ec658af9e10e00831f16d1925c14361228853807e456f6553",
            ("plan",),
        ),
    },
}


def folder() -> Path:
    """The installed vLLM's package folder, found without importing it; Unusable when there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Unusable("this Python has no vLLM: use /usr/local/bin/glm-vllm, which belongs to a release")
    return Path(spec.origin).parent


def version() -> str:
    """The installed vLLM's version, without the build's own suffix (+cpu, +cu130)."""
    return importlib.metadata.version("vllm").partition("+")[0]


def knows(hook: str) -> bool:
    """Whether `hook` was written for this version of vLLM, whatever its files are."""
    return any(hook in users for _, users in FILES.get(version(), {}).values())


def require(hook: str) -> None:
    """Refuse unless this vLLM is one that `hook` was written for, file by file."""
    versions = [name for name, files in FILES.items() if any(hook in users for _, users in files.values())]
    home, found = folder(), version()
    if found not in versions:
        raise Refusal(
            f"{hook} was written for vLLM {' and '.join(versions)}, and this is {found}: deploy a release of ours"
        )
    for name, (digest, users) in FILES[found].items():
        if hook in users and hashlib.sha256((home / name).read_bytes()).hexdigest() != digest:
            raise Refusal(
                f"vllm/{name} is not the file of vLLM {found} that {hook} was written for: build the release anew"
            )
