"""Splits a source among clients: what is held out, what the classes of a partition are, and who gets which part."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ..lanes import rng_of
from .named import DataOptions
from .partition import Counts, dirichlet_counts, hand_out, holdout, iid_counts, shard_counts
from .source import UNKNOWN, Client, Indices, Mask, Source


def split(source: Source, options: DataOptions) -> tuple[tuple[Client, ...], Indices]:
    """Returns the clients and the server's labelled part; every sample goes to exactly one of them.

    Test data (the official ones, if there are any) are taken first, then validation data, then the server's part. The
    clients get the rest. A sample that is declared for both test and validation is test data.
    """
    rng = rng_of(options.seed, "split")
    every = np.arange(len(source.images))
    declared_test, declared_val = _marked(source.test, every), _marked(source.val, every)
    declared_val = np.setdiff1d(declared_val, declared_test)
    free = np.setdiff1d(every, np.concatenate([declared_test, declared_val]))
    labels = categories(source, free, options.meta_min)
    if options.partition == "site":
        return _by_site(source, options, labels, (free, declared_val, declared_test), rng)
    test, val, train = _hold_out(labels, free, declared_test, declared_val, options, rng)
    server = holdout(labels, train, options.server_val, rng) if options.server_val else train[:0]
    train = np.setdiff1d(train, server)
    labels = categories(source, train, options.meta_min)
    counts = _counts(np.bincount(labels[train], minlength=int(labels.max()) + 1), options, rng)
    return hand_out(counts, labels, train, val, test, rng), server


def fingerprint(source: Source, clients: Sequence[Client], server: Indices) -> str:
    """Returns a hash of which images are in which part of which client.

    Images are identified by the names of their files or, without files, by their places and labels.
    """
    parts = [(c.name, part) for c in clients for part in (c.train, c.val, c.test)]
    digest = hashlib.sha256()
    for name, part in (*parts, ("", server)):
        digest.update(f"{len(part)} {name}\n".encode())
        if source.names is None:
            digest.update(part.astype("<i8").tobytes() + source.targets[part].tobytes())
        else:
            digest.update("\n".join(source.names[i] for i in part).encode(errors="surrogateescape"))
    return digest.hexdigest()


def pixels_hash(source: Source) -> str:
    """Returns a hash of the pixels of images that have no file names to recognise them by; empty for files."""
    return "" if source.names is not None else hashlib.sha256(np.ascontiguousarray(source.images).data).hexdigest()


def categories(source: Source, train: Indices, least: int) -> NDArray[np.int64]:
    """Returns the classes of a partition, int64 `[N]`: the labels, or categories of multi-label data.

    Each combination of labels that at least `least` samples of `train` have is a category, in the order of the
    combinations as binary numbers; a label that is not known counts as absent here. All other samples are one more
    category. With fewer than two categories, the
    clients of a Dirichlet partition differ in size, not in what they hold.
    """
    if not source.multilabel:
        return source.targets.astype(np.int64)
    known = np.where(source.targets == UNKNOWN, 0, source.targets)
    combinations, which = np.unique(known, axis=0, return_inverse=True)
    which = which.reshape(-1)  # only numpy 2.0 gives [N, 1]
    often = np.bincount(which[train], minlength=len(combinations)) >= least
    number = np.where(often, np.cumsum(often) - 1, often.sum())
    return number.astype(np.int64)[which]


def _marked(mask: Mask | None, pool: Indices) -> Indices:
    """Returns the samples of `pool` that a mask of all samples marks."""
    return pool[:0] if mask is None else pool[mask[pool]]


def _hold_out(
    labels: NDArray[np.int64],
    free: Indices,
    test: Indices,
    val: Indices,
    options: DataOptions,
    rng: np.random.Generator,
    left: float | None = None,
) -> tuple[Indices, Indices, Indices]:
    """Returns test, validation and training data: the declared ones (`test`, `val`), or else a share of the `free`.

    If test data are held out, `DataOptions.val` is a share of what there was before. `left` is the share that the
    test data leave; by default it is counted.
    """
    before = 1.0
    if not len(test):
        test = holdout(labels, free, options.test, rng)
        rest = np.setdiff1d(free, test)
        before = len(rest) / max(1, len(free)) if left is None else left
        free = rest
    if not len(val):
        val = holdout(labels, free, options.val / before, rng) if len(free) else free
        free = np.setdiff1d(free, val)
    return test, val, free


def _counts(supply: Counts, options: DataOptions, rng: np.random.Generator) -> Counts:
    """Returns the training samples per client and class, `[clients, classes]`."""
    if options.partition == "iid":
        return iid_counts(supply, options.clients, rng)
    if options.partition == "shards":
        return shard_counts(supply, options.clients, options.shards, rng)
    return dirichlet_counts(
        supply, options.clients, options.alpha, rng, options.cap, min_per_class=options.min_per_class
    )


def _by_site(
    source: Source,
    options: DataOptions,
    labels: NDArray[np.int64],
    pools: tuple[Indices, Indices, Indices],
    rng: np.random.Generator,
) -> tuple[tuple[Client, ...], Indices]:
    """Gives each site its own data and declared splits; a site without test or validation data holds some out.

    What a site holds out depends on its name and not on the other sites, so a site alone on its machine does the same.
    """
    if source.site is None:
        raise InputError(
            "DataOptions.partition=site needs site/class/image folders, or a manifest with a column of sites "
            "(DataOptions.site): to simulate sites, set DataOptions.partition=dirichlet and DataOptions.clients=N"
        )
    free, declared_val, declared_test = pools
    names, owner = np.unique(source.site, return_inverse=True)
    owner = owner.reshape(-1)  # only numpy 2.0 gives [N, 1]

    def of_sites(pool: Indices) -> list[Indices]:
        """Returns each site's part of a pool; in one pass, because there may be many sites."""
        ends = np.cumsum(np.bincount(owner[pool], minlength=len(names)))
        return np.split(pool[np.argsort(owner[pool], kind="stable")], ends[:-1])

    parts = []
    for name, mine, val, test in zip(names, *map(of_sites, (free, declared_val, declared_test)), strict=True):
        own = rng_of(options.seed, "split", str(name))
        parts.append(_hold_out(labels, mine, test, val, options, own, left=1 - options.test))
    train = np.sort(np.concatenate([train for *_, train in parts]))
    server = holdout(labels, train, options.server_val, rng) if options.server_val else train[:0]
    each = zip(names, parts, strict=True)
    return tuple(Client(str(n), np.setdiff1d(train, server), val, test) for n, (test, val, train) in each), server
