"""What a round costs a client, per method: measured once for a comparison, and kept beside its runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ..client.cost import RoundCost, round_cost
from ..config import Config
from ..errors import InputError
from ..models import network_of
from ..runs.files import is_number, write_atomic
from ..runs.run import Run

FILE = "cost.json"
HEAD = ("kB up", "kB down", "GFLOP", "MiB", "s")
Costs = Mapping[str, RoundCost]  # by method


def about(costs: Costs, seconds: bool = True) -> str:
    """Returns what the numbers of a table of costs are."""
    one = next(iter(costs.values()))
    return (
        f"a round of a client with {one.images} images, one epoch of mini-batches of {one.batch}: kB up and down, "
        f"operations, tensors alive at once without the frozen network{', seconds on this machine' if seconds else ''}"
    )


def cells(cost: RoundCost) -> list[str]:
    """Returns a cost as texts, in the order of `HEAD`. The seconds come last, as they differ between measurements."""
    traffic = [f"{size / 1e3:,.0f}" for size in (cost.bytes_up, cost.bytes_down)]
    return [*traffic, f"{cost.gflop:,.2f}", f"{cost.peak_bytes / 2**20:,.0f}", f"{cost.seconds:.2f}"]


def read_costs(folder: Path) -> dict[str, RoundCost]:
    """Returns the costs in a folder's file; nothing without a file that can be read, as they can be measured again."""
    try:
        written = json.loads((folder / FILE).read_text("utf8"))
        numbers = [value for one in written.values() for value in one.values()]
        return {str(name): RoundCost(**one) for name, one in written.items()} if all(map(is_number, numbers)) else {}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def write_costs(folder: Path, costs: Costs) -> None:
    """Writes the costs beside the runs."""
    content = json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1) + "\n"
    write_atomic(folder / FILE, content.encode())


def measure(config: Config, classes: int, size: int) -> RoundCost | None:
    """Returns what a round of a configuration costs a client with images of `size` pixels.

    None if its network is not here, as with one from Python.
    """
    model = config.model
    try:
        made = network_of(model.backbone, classes, size)
        return round_cost(
            config.make_method(), made, classes, size=size, adapter=model.strategy(), adapt_from=model.adapt_from
        )
    except InputError:
        return None


def costs_beside(runs: Sequence[Run]) -> dict[str, RoundCost]:
    """Returns the costs that a comparison has measured for its runs; nothing for runs that are not in one folder."""
    folders = {run.path.parent for run in runs}
    return read_costs(folders.pop()) if len(folders) == 1 else {}


def measured_costs(runs: Sequence[Run]) -> dict[str, RoundCost]:
    """Measures what a round costs a client, once per method."""
    first = {run.config.method_name: run for run in reversed(runs)}
    found = {n: measure(r.config, len(r.names.classes), r.names.images.shape[-1]) for n, r in first.items()}
    return {name: cost for name, cost in found.items() if cost is not None}
