"""Partitions: pure functions that split a data set among clients, given a generator.

A partition is a table of counts `[clients, classes]`: how many training samples of each class each client gets.
`dirichlet_counts`, `iid_counts` and `shard_counts` draw one, `follow` gives validation and test data the same
proportions, and `deal` turns counts into indices. The "classes" of multi-label data are those of `split.categories`.
"""

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .source import Client, Indices

Counts = NDArray[np.int64]  # [clients, classes]
Floats = NDArray[np.float64]

LEAST = 2  # training samples that batch norm needs; a simulated client with fewer gets some from others
SLACK = 2  # samples of a class by which two splits of equal class balance may differ, because both were rounded
STRETCH = 4.0  # `follow` changes the size of a client by at most this factor to meet proportions
CLOSE = 0.02  # total variation at which `follow` calls proportions met: less would change client sizes more
SWEEPS = 200  # after which it stops


def largest_remainder(shares: Floats, total: int | Counts) -> Counts:
    """Returns whole numbers proportional to `shares` `[..., k]`, which sum to `total` `[...]`; ties go low."""
    sums = np.asarray(total, np.int64)
    exact = shares / shares.sum(-1, keepdims=True) * sums[..., None]
    counts: Counts = np.floor(exact).astype(np.int64)
    short = sums - counts.sum(-1)
    rank = np.argsort(np.argsort(counts - exact, axis=-1, kind="stable"), axis=-1, kind="stable")
    counts += rank < short[..., None]
    return counts


def _enough(total: int, clients: int) -> None:
    if total < clients * LEAST:
        raise InputError(
            f"{clients} clients need {LEAST} training samples each but there are {total}: "
            "lower DataOptions.clients or use more data"
        )


def dirichlet_counts(
    supply: Counts,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    cap: bool = True,
    min_per_class: int = 0,
) -> Counts:
    """Returns the samples per client and class, `[clients, classes]`; columns sum to `supply` `[classes]`.

    Every client first gets `min_per_class` of each class. The rest of a class is dealt by its own draw from Dir(α).
    With `cap`, a client that has N/M samples gets nothing of the classes still to come, so it ends with less than
    N/M plus its last class. A client with fewer than `LEAST` gets some from others.
    """
    total = int(supply.sum())
    _enough(total, clients)
    if min_per_class and supply.min() < clients * min_per_class:
        raise InputError(
            f"DataOptions.min_per_class={min_per_class} needs {clients * min_per_class} training samples of each class "
            f"for {clients} clients, but class {int(supply.argmin())} has {int(supply.min())}: lower it, or "
            "DataOptions.clients"
        )
    counts = np.full((clients, len(supply)), min_per_class, np.int64)
    rest = supply - clients * min_per_class
    for label in rng.permutation(len(supply)):
        if not rest[label]:
            continue
        shares = _dirichlet(alpha, clients, rng)
        if cap:
            shares = np.where(counts.sum(1) < total / clients, np.maximum(shares, 1e-12), 0.0)
        counts[:, label] += largest_remainder(shares, int(rest[label]))
    return feed(counts, LEAST, counts)


def _dirichlet(alpha: float, clients: int, rng: np.random.Generator) -> Floats:
    """Draws Dir(α) `[clients]` through logarithms of gamma draws, so that a tiny α gives one winner, not 0/0."""
    logs = np.log(rng.gamma(alpha + 1.0, size=clients)) + np.log(1.0 - rng.random(clients)) / max(alpha, 1e-12)
    raw = np.exp(logs - logs.max())
    shares: Floats = raw / raw.sum()
    return shares


def iid_counts(supply: Counts, clients: int, rng: np.random.Generator) -> Counts:
    """Returns counts of all samples shuffled and cut into parts whose sizes differ by at most one."""
    total = int(supply.sum())
    _enough(total, clients)
    shuffled = rng.permutation(np.repeat(np.arange(len(supply)), supply))
    return _table(_parts(total, clients), shuffled, clients, len(supply))


def shard_counts(supply: Counts, clients: int, shards: int, rng: np.random.Generator) -> Counts:
    """Returns counts of samples sorted by label, cut into equal runs, `shards` runs per client (McMahan et al.).

    A run across the end of a class has two labels (more, if classes are smaller than a run). If runs divide the
    classes evenly, a client has at most `shards` labels.
    """
    total = int(supply.sum())
    _enough(total, clients)
    pieces = clients * shards
    if total < pieces:
        raise InputError(
            f"{clients} clients with DataOptions.shards={shards} need {pieces} training samples but there are {total}: "
            "lower it, or DataOptions.clients"
        )
    owner = rng.permutation(pieces) // shards
    ordered = np.repeat(np.arange(len(supply)), supply)
    return _table(owner[_parts(total, pieces)], ordered, clients, len(supply))


def _parts(total: int, parts: int) -> Indices:
    """Returns the part of each of `total` places, `[total]`, cut into runs whose lengths differ by at most one."""
    return np.arange(total) * parts // total


def _table(owner: Indices, labels: Indices, clients: int, classes: int) -> Counts:
    """Returns the counts `[clients, classes]` of samples with these owners and labels, both `[n]`."""
    return np.bincount(owner * classes + labels, minlength=clients * classes).reshape(clients, classes)


def feed(counts: Counts, at_least: int, own: Counts) -> Counts:
    """Moves samples to clients with fewer than `at_least`, from the client that has the most of a class.

    The class is one that the client trains on (`own`, `[clients, classes]`), if there is one to give. Only as many
    samples move as are missing: while one client has too few, another has more than enough.
    """
    counts = counts.copy()
    sizes = counts.sum(1)
    if sizes.sum() < at_least * len(counts):
        raise InputError(
            f"{len(counts)} clients cannot get {at_least} of {int(sizes.sum())} samples: lower DataOptions.clients"
        )
    for client in np.repeat(np.arange(len(counts)), np.maximum(at_least - sizes, 0)):
        spare = np.where(sizes[:, None] > at_least, counts, 0)
        fitting = spare * (own[client] > 0)
        giver, label = np.unravel_index((fitting if fitting.any() else spare).argmax(), counts.shape)
        counts[giver, label] -= 1
        counts[client, label] += 1
        sizes[giver] -= 1
        sizes[client] += 1
    return counts


def follow(train: Counts, supply: Counts, at_least: int = 0) -> Counts:
    """Returns another split's counts in each client's training proportions; columns sum to `supply`.

    Each class is dealt in proportion to the clients' training counts of it, by largest remainder. If the split has
    the class balance of the training data, every client gets its own training proportions.

    If not, the clients' totals are rescaled (`_rescaled`) until the proportions are met. Not all can be met if, say,
    all clients train on few samples of a class that fills the test set. Those who train on such a class then share
    the difference in proportion. A class without training samples is dealt evenly.

    With equal balance, a count is within one of the largest-remainder rounding of the client's own proportions. If
    rounding class by class misses that, what a client lost in one class counts in the next (`_carried`).
    """
    even = supply.sum() * train.sum(0) / max(1, int(train.sum()))
    alike = bool((np.abs(supply - even) <= SLACK).all())
    shares = train.astype(np.float64) if alike else _rescaled(train, supply)
    shares[:, train.sum(0) == 0] = 1.0
    out = largest_remainder(shares.T, supply).T
    if _strays(out, train):
        carried = _carried(shares / shares.sum(0) * supply, supply)
        out = min(out, carried, key=lambda counts: _strays(counts, train))
    return feed(out, at_least, train)


def _rescaled(train: Counts, supply: Counts) -> Floats:
    """Returns shares of each class `[clients, classes]`, with clients' totals chosen to meet the proportions.

    We look for totals n >= 0 with sum_m n_m p_mc = supply_c, where p are the training proportions. A sweep deals all
    of the supply by the present totals, and what a client then has is its next total. These are the EM steps of a
    mixture with known components, which converge to a solution. They start from the training sizes and stop when
    the proportions are close enough, so totals stay close to those sizes.
    """
    size = train.sum(1)
    own = train / np.maximum(size, 1)[:, None]
    start = size * supply.sum() / max(1, int(size.sum()))
    totals: Floats = start
    for _ in range(SWEEPS):
        shares: Floats = totals[:, None] * own
        dealt = shares * (supply / np.maximum(shares.sum(0), 1e-300))
        sums = dealt.sum(1)
        wrong = 0.5 * np.abs(dealt - sums[:, None] * own).sum(1)  # samples of a client that have another class
        if (wrong <= np.maximum(CLOSE * sums, 1.0)).all():  # rounding costs one anyway
            break
        totals = np.clip(sums, start / STRETCH, start * STRETCH)
    return shares


def _strays(counts: Counts, train: Counts) -> int:
    """Returns how many counts are more than one off the rounding of the client's training proportions."""
    training = train.sum(1) > 0
    rounded = largest_remainder(train[training].astype(np.float64), counts[training].sum(1))
    return int((np.abs(counts[training] - rounded) > 1).sum())


def _carried(exact: Floats, supply: Counts) -> Counts:
    """Returns `exact` `[clients, classes]` rounded so that columns sum to `supply` and rows stay close to their sums.

    Class by class, large ones first, it rounds up the clients with the largest sum of remainder and earlier losses.
    """
    exact = np.where(np.abs(exact - np.rint(exact)) < 1e-9, np.rint(exact), exact)  # whole numbers stay as they are
    out: Counts = np.floor(exact).astype(np.int64)
    lost = np.zeros(len(exact))
    for label in np.argsort(-supply, kind="stable"):
        part = exact[:, label] - out[:, label]
        first = np.argsort(np.where(part > 0, -part - lost, np.inf), kind="stable")
        out[first[: int(supply[label] - out[:, label].sum())], label] += 1
        lost += exact[:, label] - out[:, label]
    return out


def deal(counts: Counts, labels: NDArray[np.int64], pool: Indices, rng: np.random.Generator) -> list[Indices]:
    """Returns the samples of `pool` `[n]` as one sorted index list per client, by `counts`."""
    samples = np.concatenate([rng.permutation(pool[labels[pool] == label]) for label in range(counts.shape[1])])
    owner = np.concatenate([np.repeat(np.arange(len(counts)), column) for column in counts.T])
    return np.split(samples[np.lexsort((samples, owner))], np.cumsum(counts.sum(1))[:-1])


def holdout(labels: NDArray[np.int64], pool: Indices, fraction: float, rng: np.random.Generator) -> Indices:
    """Returns a stratified part of `pool` `[n]`: `fraction` of it, spread over the classes by largest remainder."""
    total = round(fraction * len(pool))
    if total == 0:
        return pool[:0]
    parts = [rng.permutation(pool[labels[pool] == c]) for c in np.unique(labels[pool])]
    sizes = largest_remainder(np.array([len(p) for p in parts], np.float64), total)
    return np.sort(np.concatenate([p[:n] for p, n in zip(parts, sizes, strict=True)]))


def hand_out(
    counts: Counts,
    labels: NDArray[np.int64],
    train: Indices,
    val: Indices,
    test: Indices,
    rng: np.random.Generator,
) -> tuple[Client, ...]:
    """Returns clients with `counts` of the training data, and validation and test data in the same proportions."""
    clients, classes = counts.shape
    parts = [deal(counts, labels, train, rng)]
    for pool in (val, test):
        same = follow(counts, np.bincount(labels[pool], minlength=classes), at_least=1 if len(pool) >= clients else 0)
        parts.append(deal(same, labels, pool, rng))
    width = max(2, len(str(clients - 1)))
    return tuple(Client(f"client-{i:0{width}d}", a, b, c) for i, (a, b, c) in enumerate(zip(*parts, strict=True)))
