"""How `perada bounds` prints."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from ..config import in_keys
from ..theory import Bound, Bounds, Convergence
from .tables import house_table

DISTANCES = {"global": "the run's global model", "average": "the local models' average", "student": "the student"}


def pages(measured: Bounds) -> Iterator[Table | str]:
    """Yields the tables of both theorems on generalisation, of the convergence, and the three sentences."""
    yield f"{measured.run}: {measured.method} after {measured.round} rounds"
    for bound in (measured.theorem1, measured.theorem2):
        if bound is None:
            yield "Theorem 1: not measured, because the run has no public images"
            continue
        yield _terms(bound)
        yield _totals(bound)
    if measured.distillation is not None:
        yield _distances(measured.distillation)
    yield from _convergence(measured.convergence)
    yield "\n".join(f"{'!' if s.warns else '·'} {in_keys(s.text)}" for s in measured.sentences)


def _terms(bound: Bound) -> Table:
    table = house_table(f"Theorem {bound.theorem}: {bound.model}", "term", "symbol", "value", "low", "high", "adds")
    for t in bound.terms:
        table.add_row(t.name, t.symbol, *(_number(v) for v in (t.value, t.low, t.high, t.share)))
    return table


def _totals(bound: Bound) -> Table:
    table = house_table(None, f"error at most, by Theorem {bound.theorem}", "value", "")
    table.columns[-1].justify = "left"
    for total in bound.totals:
        says = "cannot be measured" if total.value is None else "vacuous" if total.vacuous else ""
        promise = [] if total.holds else ["not a bound"]
        table.add_row(total.name, _number(total.value), ", ".join([*promise, *([says] if says else [])]))
    table.add_row("the measured error", _number(bound.error), "")
    return table


def _distances(of: dict[str, float | int | None]) -> Table:
    title = "Φ in a further round, on the public images: to the mean of the local models'"
    table = house_table(title, "of", "probabilities", "logits", "with public statistics", "logits")
    for name, about in DISTANCES.items():
        if f"{name}_probabilities" in of:
            steps = f" after {of['steps']} steps" if name == "student" else ""
            kinds = ("probabilities", "logits", "probabilities_public_norm", "logits_public_norm")
            table.add_row(about + steps, *(_number(of[f"{name}_{kind}"]) for kind in kinds))
    table.caption = f"the two averages are {_number(of['between_averages'])} from each other"
    return table


def _convergence(of: Convergence) -> Iterator[Table | str]:
    c = of.constants
    table = house_table("Theorems 3 and 4: constants", *[n for n, _ in _constants(of)])
    table.columns[0].justify = "right"
    table.add_row(*[v for _, v in _constants(of)])
    yield table
    table = house_table(None, "round", "‖∇L(w)‖²", "L(w)")
    for row in zip(of.rounds, of.norms, of.losses, strict=True):
        table.add_row(str(row[0]), *(_number(v) for v in row[1:]))
    yield table
    yield f"T = {c.T}, E = {c.E}, S = {c.S}, R = {c.R}, M = {c.M}"
    yield _rates("Theorem 3, with 1 for the constant in its O(·)", of.theorem3)
    if of.theorem4:
        yield _rates("Theorem 4, with 1 for the constant in its O(·)", of.theorem4)
        mean = sum(of.personal_norms) / len(of.personal_norms)
        yield f"‖∇P_m(v_m, w)‖² at the last state: {_number(mean)}, the mean over clients"
    yield "\n".join(f"note: {line}" for line in of.notes)


def _constants(of: Convergence) -> Sequence[tuple[str, str]]:
    c = of.constants
    named = {"L": c.L, "L_R": c.L_R, "σ²": c.sigma2, "σ_R²": c.sigma_R2, "γ̄": c.gamma, "G": c.G, "G_R": c.G_R}
    return [(name, _number(value)) for name, value in {**named, "G_P": c.G_P}.items()]


def _rates(title: str, parts: dict[str, float]) -> Table:
    table = house_table(title, *parts, "sum")
    table.columns[0].justify = "right"
    table.add_row(*(_number(v) for v in parts.values()), _number(sum(parts.values())))
    return table


def _number(value: float | int | None) -> str:
    """Returns `0.219`, `1,234`, `2.6e-03`, or n/a."""
    if value is None:
        return "n/a"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.3f}"
