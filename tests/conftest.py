"""Settings of the whole test run."""

import atexit
import os
import tempfile

# The promises tested here (byte-identity, float64 to 1e-9) are the CPU's; a GPU in the machine must not change them.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its kernels run on the CPU

import torch

# The tests' tensors are tiny: two OpenMP threads that wait for each other on a busy machine made the lane
# tests ten times slower than one thread. Byte-identity is promised for a fixed thread count, too.
torch.set_num_threads(1)

CACHE = tempfile.TemporaryDirectory(prefix="perada-cache-")  # decoded images of tests are nothing to keep at home
atexit.register(CACHE.cleanup)
os.environ["PERADA_CACHE"] = CACHE.name
