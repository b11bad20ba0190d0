"""Programmatic dependent launch stays off on capability 12.x, where it raced the KDA state kernels in an older stack.

vLLM asks its platform, some modules while they are imported, so the answer is changed before any of them is. Other
capabilities are left alone; the unit's GLM_PDL=1 leaves 12.x alone too.
"""

from __future__ import annotations

import os
from typing import Any

NAME = "is_arch_support_pdl"


def wanted() -> bool:
    """Whether the unit asks for it."""
    return os.environ.get("GLM_PDL") == "1"


def turn_off(platform: type) -> None:
    """Have `platform` (a class of vLLM's) answer no on 12.x, and as before elsewhere. Twice is once."""
    owner = next((kind for kind in platform.__mro__ if NAME in vars(kind)), None)
    if owner is None:
        return
    original = vars(owner)[NAME].__get__(None, owner)
    if getattr(original, "ours", False):
        return

    def is_arch_support_pdl(cls: Any) -> bool:
        return not cls.is_device_capability_family(120) and original()

    is_arch_support_pdl.ours = True
    setattr(owner, NAME, classmethod(is_arch_support_pdl))


def register() -> None:
    """Called by vLLM in each of its processes, once or more often."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda() and not wanted():
        turn_off(type(current_platform))
