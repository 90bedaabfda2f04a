"""Settings of the whole test run."""

import torch

# The tests' tensors are tiny: two OpenMP threads that wait for each other on a busy machine made the lane
# tests ten times slower than one thread. Byte-identity is promised for a fixed thread count, too.
torch.set_num_threads(1)
