"""Splitting a data set among clients. Every function is a pure function of its arguments and generator.

A partition is a table of counts `[clients, classes]`: how many training samples of each class each client gets.
`dirichlet_counts`, `iid_counts` and `shard_counts` draw one; `follow` gives validation and test data the same
proportions; `deal` turns counts into indices. "Classes" of multi-label data are the meta-categories of
`split.categories`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .federation import Client, Indices

Counts = NDArray[np.int64]  # [clients, classes]
Floats = NDArray[np.float64]

LEAST = 2  # training samples that batch norm needs; a simulated client with fewer is fed by others
SLACK = 2  # samples of a class by which two splits of equal class balance may differ: both were rounded
STRETCH = 4.0  # `follow` counts no client for more or less than this many times its size to meet proportions
CLOSE = 0.02  # total variation at which `follow` calls proportions met: nearer would cost client sizes more
SWEEPS = 200  # after which it stops looking


def largest_remainder(shares: Floats, total: int | Counts) -> Counts:
    """Whole numbers proportional to `shares` `[..., k]` that sum to `total` `[...]` along the last axis.

    Ties go to the lower index.
    """
    wanted = np.asarray(total, np.int64)
    exact = shares / shares.sum(-1, keepdims=True) * wanted[..., None]
    counts: Counts = np.floor(exact).astype(np.int64)
    short = wanted - counts.sum(-1)
    rank = np.argsort(np.argsort(counts - exact, axis=-1, kind="stable"), axis=-1, kind="stable")
    counts += rank < short[..., None]
    return counts


def _enough(total: int, clients: int, at_least: int = LEAST) -> None:
    if total < clients * at_least:
        raise InputError(
            f"{clients} clients need {at_least} training samples each but there are {total}: "
            "lower data.clients or use more data"
        )


def dirichlet_counts(
    supply: Counts,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    cap: bool = True,
    at_least: int = LEAST,
    min_per_class: int = 0,
) -> Counts:
    """How many samples of each class each client gets, `[clients, classes]`; columns sum to `supply` `[classes]`.

    Everybody first gets `min_per_class` of each class; what is left of a class is dealt out by its own draw from
    Dir(α). With `cap`, a client that has reached N/M samples takes no part in the classes still to come, so it
    ends with less than N/M and its last class. A client left with fewer than `at_least` is fed by others.
    """
    total = int(supply.sum())
    _enough(total, clients, at_least)
    if min_per_class and supply.min() < clients * min_per_class:
        raise InputError(
            f"data.min_per_class={min_per_class} needs {clients * min_per_class} training samples of each class for "
            f"{clients} clients, but class {int(supply.argmin())} has {int(supply.min())}: lower data.min_per_class "
            "or data.clients"
        )
    counts = np.full((clients, len(supply)), min_per_class, np.int64)
    rest = supply - clients * min_per_class
    for label in rng.permutation(len(supply)):
        if not rest[label]:
            continue
        shares = _dirichlet(alpha, clients, rng)
        if cap:
            open_ = counts.sum(1) < total / clients
            shares = np.where(open_, np.maximum(shares, 1e-12), 0.0)
        counts[:, label] += largest_remainder(shares, int(rest[label]))
    return feed(counts, at_least, counts)


def _dirichlet(alpha: float, clients: int, rng: np.random.Generator) -> Floats:
    """Dir(α) `[clients]` through logarithms of gamma draws, so that a tiny α gives one winner, not 0/0."""
    logs = np.log(rng.gamma(alpha + 1.0, size=clients)) + np.log(1.0 - rng.random(clients)) / max(alpha, 1e-12)
    raw = np.exp(logs - logs.max())
    shares: Floats = raw / raw.sum()
    return shares


def iid_counts(supply: Counts, clients: int, rng: np.random.Generator) -> Counts:
    """All samples shuffled and cut into parts whose sizes differ by at most one, `[clients, classes]`."""
    total = int(supply.sum())
    _enough(total, clients)
    shuffled = rng.permutation(np.repeat(np.arange(len(supply)), supply))
    return _table(_parts(total, clients), shuffled, clients, len(supply))


def shard_counts(supply: Counts, clients: int, shards: int, rng: np.random.Generator) -> Counts:
    """McMahan et al.: samples sorted by label, cut into `clients · shards` equal runs, `shards` of them a client.

    `[clients, classes]`. A shard that lies across the end of a class holds two labels (more, where classes are
    smaller than a shard); where shards divide the classes evenly a client has at most `shards` labels.
    """
    total = int(supply.sum())
    _enough(total, clients)
    pieces = clients * shards
    if total < pieces:
        raise InputError(
            f"{clients} clients with data.shards={shards} need {pieces} training samples but there are {total}: "
            "lower data.shards or data.clients"
        )
    owner = rng.permutation(pieces) // shards
    ordered = np.repeat(np.arange(len(supply)), supply)
    return _table(owner[_parts(total, pieces)], ordered, clients, len(supply))


def _parts(total: int, parts: int) -> Indices:
    """The part `[total]` of each of `total` places when cut into runs whose lengths differ by at most one."""
    return np.arange(total) * parts // total


def _table(owner: Indices, labels: Indices, clients: int, classes: int) -> Counts:
    """Counts `[clients, classes]` of samples with these owners and labels, both `[n]`."""
    return np.bincount(owner * classes + labels, minlength=clients * classes).reshape(clients, classes)


def feed(counts: Counts, at_least: int, own: Counts) -> Counts:
    """Move samples to clients with fewer than `at_least`: of a class the client trains on (`own`, `[clients,
    classes]`) where there is one, from the client that has the most of it.

    Exactly as many moves as samples are missing: with enough in all, while one client has too few another has
    more than enough.
    """
    counts = counts.copy()
    sizes = counts.sum(1)
    if sizes.sum() < at_least * len(counts):
        raise InputError(
            f"{int(sizes.sum())} samples cannot give each of {len(counts)} clients {at_least}: lower data.clients"
        )
    for client in np.repeat(np.arange(len(counts)), np.maximum(at_least - sizes, 0)):
        given = np.where(sizes[:, None] > at_least, counts, 0)
        wanted = given * (own[client] > 0)
        giver, label = np.unravel_index((wanted if wanted.any() else given).argmax(), counts.shape)
        counts[giver, label] -= 1
        counts[client, label] += 1
        sizes[giver] -= 1
        sizes[client] += 1
    return counts


def follow(train: Counts, supply: Counts, at_least: int = 0) -> Counts:
    """Another split's counts `[clients, classes]` in each client's training proportions; columns sum to `supply`.

    Each class is dealt out in proportion to the clients' training counts of it, by largest remainder. Where the
    split has the class balance of the training data, that gives every client its own training proportions.

    Where it has not, the clients' totals are rescaled (`_rescaled`) until the proportions are met. They cannot be
    met by all if every sample is to be used and, say, all clients train on few samples of a class of which the
    test set is full: what is too much or too little of a class is then shared in proportion by those who train on
    it. A class that nobody trains on is dealt out evenly.

    With equal balance a client's count of a class is within one of the largest-remainder rounding of its own
    proportions; where rounding class by class misses that, what a client lost in one class counts in the next.
    """
    even = supply.sum() * train.sum(0) / max(1, int(train.sum()))
    alike = bool((np.abs(supply - even) <= SLACK).all())
    shares = train.astype(np.float64) if alike else _rescaled(train, supply)
    shares[:, train.sum(0) == 0] = 1.0
    out = largest_remainder(shares.T, supply).T
    if _strays(out, train):
        carried = _carried(shares / shares.sum(0) * supply, supply)
        out = min(out, carried, key=lambda found: _strays(found, train))
    return feed(out, at_least, train)


def _rescaled(train: Counts, supply: Counts) -> Floats:
    """Shares of each class `[clients, classes]` with the clients' totals chosen so that proportions are met.

    We look for totals n >= 0 with sum_m n_m p_mc = supply_c, p being the training proportions. A sweep deals out
    all of the supply by the present totals, and what a client then has is its next total: the EM steps of a
    mixture with known components, which come ever nearer to a solution and change nothing once there. Starting
    from the training sizes and stopping when near enough keeps the totals close to those.
    """
    size = train.sum(1)
    own = train / np.maximum(size, 1)[:, None]
    start = size * supply.sum() / max(1, int(size.sum()))
    totals: Floats = start
    for _ in range(SWEEPS):
        shares: Floats = totals[:, None] * own
        dealt = shares * (supply / np.maximum(shares.sum(0), 1e-300))
        held = dealt.sum(1)
        wrong = 0.5 * np.abs(dealt - held[:, None] * own).sum(1)  # samples of a client that are of another class
        if (wrong <= np.maximum(CLOSE * held, 1.0)).all():  # one is what rounding costs anyway
            break
        totals = np.clip(held, start / STRETCH, start * STRETCH)
    return shares


def _strays(counts: Counts, train: Counts) -> int:
    """How many counts are more than one off the largest-remainder rounding of the client's training proportions."""
    holds = train.sum(1) > 0
    wanted = largest_remainder(train[holds].astype(np.float64), counts[holds].sum(1))
    return int((np.abs(counts[holds] - wanted) > 1).sum())


def _carried(exact: Floats, supply: Counts) -> Counts:
    """`exact` `[clients, classes]` rounded up or down, columns to `supply`, with rows close to their sums, too.

    Class by class, large ones first, those are rounded up who have the largest remainder and what they lost before.
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
    """The samples of `pool` `[n]` (with labels `labels[pool]`) as one sorted index list a client, by `counts`."""
    mine = np.concatenate([rng.permutation(pool[labels[pool] == label]) for label in range(counts.shape[1])])
    owner = np.concatenate([np.repeat(np.arange(len(counts)), column) for column in counts.T])
    return np.split(mine[np.lexsort((mine, owner))], np.cumsum(counts.sum(1))[:-1])


def holdout(labels: NDArray[np.int64], pool: Indices, fraction: float, rng: np.random.Generator) -> Indices:
    """A stratified part of `pool` `[n]`: `fraction` of it, dealt over the classes by largest remainder."""
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
    """Clients with `counts` of the training data, and validation and test data in the same proportions."""
    clients, classes = counts.shape
    parts = [deal(counts, labels, train, rng)]
    for pool in (val, test):
        held = follow(counts, np.bincount(labels[pool], minlength=classes), at_least=1 if len(pool) >= clients else 0)
        parts.append(deal(held, labels, pool, rng))
    width = max(2, len(str(clients - 1)))
    return tuple(Client(f"client-{i:0{width}d}", a, b, c) for i, (a, b, c) in enumerate(zip(*parts, strict=True)))


def dirichlet(
    labels: NDArray[np.int64],
    train: Indices,
    val: Indices,
    test: Indices,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    cap: bool = True,
    min_per_class: int = 0,
) -> tuple[Client, ...]:
    """Dir(α) over labels; a client's validation and test data follow its training proportions."""
    supply = np.bincount(labels[train], minlength=int(labels.max()) + 1)
    counts = dirichlet_counts(supply, clients, alpha, rng, cap, min_per_class=min_per_class)
    return hand_out(counts, labels, train, val, test, rng)


def by_site(sites: NDArray[np.str_], train: Indices, val: Indices, test: Indices) -> tuple[Client, ...]:
    """One client per site, each with its own data."""
    return tuple(Client(str(s), *(part[sites[part] == s] for part in (train, val, test))) for s in np.unique(sites))
