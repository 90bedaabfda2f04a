"""The paper's experiments: plans, runs, choices on validation data, and the document of the results.

    python -m experiments list                                            # runs done and left, and their minutes
    python -m experiments main --data DATA --weights W --minutes 9        # repeat the command until it is done
    python -m experiments document                                        # docs/results.md and its figures

DATA is a folder with `cifar10.npz`, `cifar100.npz`, `pacs_64.npz` and `nih_cxr14_part001_64.npz`. W is the pretrained
ResNet-18. `pacs` and `xrays` also need `--statistics`, the running statistics of W for 64 pixels.

1. Run `distill-study` and `settle` first. The preset `cifar10` has the choice of `distill-study`; a test compares.
   That of `settle` replaces it once 200 rounds and 3 seeds have tested it. The other experiments use the preset, and
   results of another preset do not count.
2. `main` goes group by group: `adapters`, `ditto`, `full`, six runs at once on a GPU. `--only ditto-0,ditto-1` names
   runs, `--only ditto` a group.
3. Then `others`, `ablations`, `pacs` and `xrays`.

`--minutes N` counts from the start of the command. A run saves and stops when its next round would not fit. The same
command continues it while its folder is there; the folder may be copied to another machine in between.
"""

from __future__ import annotations

from .plans import experiments
from .running import Clock, Place, run_experiment, state_of
from .trials import NAMES, Choice, Experiment, Trial

__all__ = ["NAMES", "Choice", "Clock", "Experiment", "Place", "Trial", "experiments", "run_experiment", "state_of"]
