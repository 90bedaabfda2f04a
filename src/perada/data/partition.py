"""Splitting a data set among clients. Every function is a pure function of its arguments and generator."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .federation import Client, Indices

Counts = NDArray[np.int64]  # [clients, classes]
Floats = NDArray[np.float64]


def largest_remainder(shares: Floats, total: int) -> Counts:
    """Whole numbers proportional to `shares` that sum to `total`; ties go to the lower index."""
    exact = shares / shares.sum() * total
    counts: Counts = np.floor(exact).astype(np.int64)
    short = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    return counts


def dirichlet_counts(
    supply: Counts, clients: int, alpha: float, rng: np.random.Generator, cap: bool = True, at_least: int = 2
) -> Counts:
    """How many samples of each class each client gets, `[clients, classes]`; columns sum to `supply`.

    Each class is dealt out by its own draw from Dir(α). With `cap`, a client that has reached N/M samples
    takes no part in the classes still to come. A client left with fewer than `at_least` is fed by others.
    """
    total = int(supply.sum())
    if total < clients * at_least:
        raise InputError(
            f"{clients} clients need {at_least} training samples each but there are {total}: "
            "lower data.clients or use more data"
        )
    counts = np.zeros((clients, len(supply)), np.int64)
    for label in rng.permutation(len(supply)):
        if not supply[label]:
            continue
        shares = _dirichlet(alpha, clients, rng)
        if cap:
            open_ = counts.sum(1) < total / clients
            shares = np.where(open_, np.maximum(shares, 1e-12), 0.0)
        counts[:, label] = largest_remainder(shares, int(supply[label]))
    return feed(counts, at_least, counts)


def _dirichlet(alpha: float, clients: int, rng: np.random.Generator) -> Floats:
    """Dir(α) through logarithms of gamma draws, so that a tiny α gives one winner, not 0/0."""
    logs = np.log(rng.gamma(alpha + 1.0, size=clients)) + np.log(1.0 - rng.random(clients)) / max(alpha, 1e-12)
    raw = np.exp(logs - logs.max())
    shares: Floats = raw / raw.sum()
    return shares


def feed(counts: Counts, at_least: int, own: Counts) -> Counts:
    """Move samples, one at a time, to clients with fewer than `at_least`: of a class the client trains on
    (`own`) where there is one, from the client that has the most of it."""
    counts = counts.copy()
    for client in range(len(counts)):
        while counts[client].sum() < at_least:
            rich = counts.sum(1) > at_least
            rich[client] = False
            given = np.where(rich[:, None], counts, 0)
            if not given.any():
                raise InputError(
                    f"{int(counts.sum())} samples cannot give each of {len(counts)} clients {at_least}: "
                    "lower data.clients"
                )
            wanted = given * (own[client] > 0)
            giver, label = np.unravel_index((wanted if wanted.any() else given).argmax(), counts.shape)
            counts[giver, label] -= 1
            counts[client, label] += 1
    return counts


def follow(train: Counts, supply: Counts, at_least: int = 0) -> Counts:
    """Another split's counts in the training data's proportions: class by class, largest remainder."""
    out = np.zeros_like(train)
    for label, total in enumerate(supply):
        shares = train[:, label].astype(np.float64)
        out[:, label] = largest_remainder(shares if shares.any() else np.ones(len(train)), int(total))
    return feed(out, at_least, train)


def deal(counts: Counts, labels: NDArray[np.int64], pool: Indices, rng: np.random.Generator) -> list[Indices]:
    """The samples of `pool` (with these labels) as one index list a client, by `counts`."""
    parts: list[list[Indices]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        mine = rng.permutation(pool[labels[pool] == label])
        for client, part in enumerate(np.split(mine, np.cumsum(counts[:, label])[:-1])):
            parts[client].append(part)
    return [np.sort(np.concatenate(p)) for p in parts]


def holdout(labels: NDArray[np.int64], pool: Indices, fraction: float, rng: np.random.Generator) -> Indices:
    """A stratified part of `pool`: `fraction` of it, dealt over the classes by largest remainder."""
    total = round(fraction * len(pool))
    if total == 0:
        return pool[:0]
    parts = [rng.permutation(pool[labels[pool] == c]) for c in np.unique(labels[pool])]
    sizes = largest_remainder(np.array([len(p) for p in parts], np.float64), total)
    return np.sort(np.concatenate([p[:n] for p, n in zip(parts, sizes, strict=True)]))


def dirichlet(
    labels: NDArray[np.int64],
    train: Indices,
    val: Indices,
    test: Indices,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    cap: bool = True,
) -> tuple[Client, ...]:
    """Dir(α) over labels; a client's validation and test data follow its training proportions."""
    classes = int(labels.max()) + 1
    supply = np.bincount(labels[train], minlength=classes)
    counts = dirichlet_counts(supply, clients, alpha, rng, cap)
    parts = [deal(counts, labels, train, rng)]
    for pool in (val, test):
        held = follow(counts, np.bincount(labels[pool], minlength=classes), at_least=1 if len(pool) >= clients else 0)
        parts.append(deal(held, labels, pool, rng))
    width = len(str(clients - 1))
    return tuple(
        Client(f"client-{i:0{max(2, width)}d}", a, b, c) for i, (a, b, c) in enumerate(zip(*parts, strict=True))
    )


def by_site(sites: NDArray[np.str_], train: Indices, val: Indices, test: Indices) -> tuple[Client, ...]:
    """One client per site, each with its own data."""
    return tuple(Client(str(s), *(part[sites[part] == s] for part in (train, val, test))) for s in np.unique(sites))
