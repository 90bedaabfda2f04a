"""timm, transformers, peft and torchvision, imported so that they work beside a torch without CUDA.

The registry's torchvision is a CUDA build, which cannot be imported beside a torch for CPUs until two of its operators
are declared. Users with a matching pair need none of this.
"""

from __future__ import annotations

import os
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: tests stay on this machine

import torch

try:
    import torchvision
except RuntimeError:  # operator torchvision::nms does not exist
    LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other people's code
    import peft
    import timm
    import transformers

__all__ = ["peft", "timm", "torchvision", "transformers"]
