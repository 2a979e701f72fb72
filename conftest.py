"""Before anything imports torch or triton: threads of OpenMP rest while they wait, and triton's kernels are interpreted
where there is no GPU to run them.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
