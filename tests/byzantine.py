"""byzfl, without its benchmark: that imports torchvision, which is not part of the tests' environment."""

from __future__ import annotations

import sys
import types

sys.modules.setdefault("byzfl.benchmark", types.ModuleType("byzfl.benchmark"))

import byzfl  # noqa: E402

__all__ = ["byzfl"]
