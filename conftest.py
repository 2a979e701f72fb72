"""Before anything imports triton: its kernels are interpreted where there is no GPU to run them."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
