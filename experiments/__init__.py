"""The paper's experiments: what is run, what is chosen by validation data, what is kept, and the document of it.

How a session on a borrowed GPU is driven. DATA is a folder with `cifar10.npz`, `cifar100.npz`, `pacs_64.npz` and
`nih_cxr14_part001_64.npz`, W the Tiny-ImageNet-pretrained ResNet-18, S its running statistics for 64 pixels; RUNS is
on the machine's own disk, RESULTS is a copy of the repository's `results/`, which comes back as one archive.

    python -m experiments list --results RESULTS --out RUNS                    # what is done, begun, left, in minutes
    python -m experiments distill-study --data DATA --weights W --out RUNS --results RESULTS --minutes 9
                                                                          # the same command again until it is done
    python -m experiments main --data DATA --weights W --out RUNS --results RESULTS --minutes 9 --only adapters

1. `distill-study` first, as often as it takes (about 16 minutes). Its last line is the recipe that validation data
   settled: write it into `presets/cifar10.toml` (a test compares) before `main`, `others` and `ablations` are begun:
   they take the preset, and results of another one count for nothing.
2. `main`, group by group: `adapters`, `ditto`, `full`, six runs at once. Without `--only` it takes them in that order;
   `--only ditto-0,ditto-1` names single runs. Of what is complete there is a result; a group that is stopped goes on
   with the same command while RUNS is there.
3. `others`, `ablations`; then `pacs` and `xrays`, with `--statistics S`.

`tools/lease.py` does the errands where such a machine takes small files and short commands only: data in pieces, a
queue of groups, results brought while it works.

`--minutes N` counts from the command's start: a run stops, saved, when its next round would not fit, so N may be a
minute less than what the machine gives to a command. What is begun and worth carrying is packed while the machine is
held,

    python -m experiments pack RUNS/main/perada-0 --out PIECES                 # perada-0.json and pieces of 15 MiB
    python -m experiments unpack PIECES/perada-0.json --out RUNS/main          # there; then the same command goes on

which for a run of adapters (20 clients) is 11 pieces, 158 MiB: three calls through a door of 64 MiB. A run of full
models would be 60 pieces: begin one only with the time to finish it. Points of a search and runs of the study are
short: they are not worth carrying, their results are.

In the repository afterwards: `python -m experiments document` makes docs/results.md and its figures from `results/`
alone; words about them go to `results/reading.md`. CI makes it again and compares.
"""

from __future__ import annotations

from .plans import NAMES, Choice, Experiment, Trial, experiments
from .running import Clock, Place, run_experiment, state_of

__all__ = ["NAMES", "Choice", "Clock", "Experiment", "Place", "Trial", "experiments", "run_experiment", "state_of"]
