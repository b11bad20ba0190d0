"""Let the registry's torchvision import beside a CPU build of torch.

Hugging Face's glm5_next image processor imports torchvision. The wheel on the default index is a CUDA build: its
compiled half cannot be loaded here, and its Python half then fails while it decorates operators that nobody declared.
The twin serves no images, so declaring those operators' schemas, without implementations, is enough.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMAS = ("nms", "qnms")
_library: torch.library.Library | None = None


def declare() -> None:
    """Declare torchvision's `nms` and `qnms`, once per process, if its compiled half is absent or cannot be loaded."""
    global _library
    spec = find_spec("torchvision")
    if _library is not None or spec is None or _loads(Path(str(spec.origin)).parent / "_C.so"):
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in _SCHEMAS:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _loads(compiled: Path) -> bool:
    try:
        torch.ops.load_library(str(compiled))
    except OSError:
        return False
    return True
