"""vLLM's CPU build taught to serve the GLM-5.3-Flash architecture: two entry points, called by vLLM itself.

This distribution belongs on the twin's machines only. On a machine with a GPU both entry points do nothing.
"""

import os

from glm_vllm_twin import host

PLATFORM = "glm_vllm_twin.platform.TwinPlatform"


def platform_plugin() -> str | None:
    """Entry point `vllm.platform_plugins`: the platform class's name, or None on any machine that is not a twin."""
    if not host.is_twin():
        return None
    from glm_vllm_twin import torchvision_ops

    torchvision_ops.declare()
    # The plain-torch path has nothing to compile, and tracing it costs seconds at start. Child processes inherit this.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    return PLATFORM


def general_plugin() -> None:
    """Entry point `vllm.general_plugins`: make vLLM load the architecture's classes with the plain-torch operators.

    Raises:
        RuntimeError: the installed vLLM is a CPU build of another version than this package was written for.
    """
    if not host.is_twin():
        return
    host.require_pinned_vllm()
    from vllm import ModelRegistry

    from glm_vllm_twin import model

    # Classes, not their names: vLLM would import a named class in a process of its own first, to look at it, and that
    # costs each start ten seconds where the import itself costs less than one.
    for architecture, model_class in model.ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, model_class)
