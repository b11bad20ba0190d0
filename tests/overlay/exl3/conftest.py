import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "files/overlay/src"))
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402

# The encoder's operations are small: more threads only wait for each other.
torch.set_num_threads(1)
