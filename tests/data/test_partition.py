"""How many samples of each class a client gets: partitions as properties over many random settings."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from perada.data import DataOptions
from perada.data.partition import dirichlet_counts, feed, follow, iid_counts, largest_remainder, shard_counts
from perada.data.split import split
from perada.errors import InputError
from perada.lanes import rng_of
from perada.report.facts import unlikeness

from .parts import counts_of, off, source_of

# Dirichlet.


@pytest.mark.parametrize("cap", [True, False])
@pytest.mark.parametrize("least", [1, 2, 5])
def test_everybody_has_the_least_of_each_class(least: int, cap: bool) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        clients = int(rng.integers(2, 40))
        supply = rng.integers(least * clients, 40 * clients, int(rng.integers(2, 12)))
        supply[0] = least * clients  # just enough
        counts = dirichlet_counts(supply, clients, 10 ** rng.uniform(-6, 2), rng, cap, min_per_class=least)
        assert counts.min() >= least
        assert counts.sum(0).tolist() == supply.tolist()
        assert (counts[:, 0] == least).all()


def test_an_impossible_least_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        InputError, match=r"^DataOptions\.min_per_class=2 needs 20 .* class 1 has 19: lower it, or DataOptions\.clients"
    ) as e:
        dirichlet_counts(np.array([100, 19, 40]), 10, 0.1, rng_of(0), min_per_class=2)
    assert "\n" not in str(e.value)
    assert dirichlet_counts(np.array([100, 20, 40]), 10, 0.1, rng_of(0), min_per_class=2).min() == 2


@pytest.mark.parametrize("least", [0, 2])
def test_a_capped_client_has_less_than_its_share_before_its_last_class(least: int) -> None:
    broken = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        clients = int(rng.integers(2, 60))
        supply = rng.integers(2 * clients, 60 * clients, int(rng.integers(2, 20)))
        alpha = 10 ** rng.uniform(-6, 2)
        limit = supply.sum() / clients
        counts = dirichlet_counts(supply, clients, alpha, rng, cap=True, min_per_class=least)
        assert (counts.sum(1) - counts.max(1) < limit).all()
        free = dirichlet_counts(supply, clients, alpha, rng, cap=False, min_per_class=least)
        broken += int((free.sum(1) - free.max(1) >= limit).any())
    assert broken > 10, "without the cap it would not hold"


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 1e6])
@pytest.mark.parametrize("classes", [10, 65])
def test_five_hundred_clients_are_quick(alpha: float, classes: int) -> None:
    source = source_of(np.arange(50_000) % classes)
    start = time.process_time()  # not the wall's clock: other work on the machine is no fault
    clients, _ = split(source, DataOptions(clients=500, alpha=alpha))
    assert time.process_time() - start < 3
    assert len(clients) == 500
    assert min(len(c.train) for c in clients) >= 2


def test_feeding_is_bounded_and_quick() -> None:
    counts = np.zeros((500, 65), np.int64)
    counts[7] = 100  # one client has it all: the others need 2 each
    start = time.process_time()
    fed = feed(counts, 2, counts)
    assert time.process_time() - start < 2
    assert fed.sum(0).tolist() == [100] * 65
    assert fed.sum(1).tolist() == [2] * 7 + [6500 - 998] + [2] * 492


# Validation and test data follow the training data.


def test_proportions_are_within_one_of_the_clients_own_rounding() -> None:
    """Of equal class balance: every count within one of the largest remainder, 0.05 in total variation for clients
    with 200 samples (of at most 20 classes: with 65, rounding alone may take 0.08)."""
    large = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        clients, classes = int(rng.integers(2, 120)), int(rng.integers(2, 100))
        if seed % 2:
            clients, classes = int(rng.integers(2, 20)), int(rng.integers(2, 20))
        each = rng.integers(1, 300, classes)
        train = dirichlet_counts(each * 5 + clients, clients, 10 ** rng.uniform(-2, 2), rng)
        supply = largest_remainder(train.sum(0).astype(float), int(each.sum()))
        found = follow(train, supply)
        samples, distance = off(train, found)
        assert found.sum(0).tolist() == supply.tolist()
        assert samples.max() <= 1, seed
        if classes <= 20:
            wide = found.sum(1) >= 200
            large += int(wide.sum())
            assert distance[wide].max(initial=0) <= 0.05, seed
    assert large > 100


def test_remainders_of_many_small_classes_do_not_add_up() -> None:
    """Rounded class by class alone, each client gets its four classes of 0.6 wrong the same way."""
    found_one = 0
    for seed in range(40):
        train = dirichlet_counts(np.full(65, 1000), 500, 0.1, rng_of(seed))
        alone = largest_remainder(train.T.astype(float), np.full(65, 200)).T
        found_one += int(off(train, alone)[0].max() > 1)
        assert off(train, follow(train, np.full(65, 200)))[0].max() <= 1
    assert found_one > 5


@pytest.mark.parametrize("seed", range(10))
def test_another_class_balance_is_met_where_client_sizes_can_meet_it(seed: int) -> None:
    """The test set is made of clients' proportions in other sizes: class by class would be far off."""
    rng = np.random.default_rng(seed)
    train = dirichlet_counts(np.full(10, 4500), 20, 0.3, rng)
    share = train / train.sum(1, keepdims=True)
    sizes = train.sum(1) * rng.choice([0.25, 1.0], 20) / 2
    supply = np.rint(sizes @ share).astype(np.int64)
    found = follow(train, supply)
    large = found.sum(1) >= 200
    alone = largest_remainder(train.T.astype(float), supply).T
    assert found.sum(0).tolist() == supply.tolist()
    assert large.sum() >= 5
    assert off(train, found)[1][large].max() <= 0.03
    assert off(train, alone)[1][large].max() > 0.05


def test_a_balance_that_cannot_be_met_still_uses_every_sample_and_only_for_those_who_train_on_it() -> None:
    """Nine of ten training samples are of class 0 at every client, the test set is half and half."""
    train = np.array([[900, 100, 0], [450, 50, 0], [90, 10, 5]])
    found = follow(train, np.array([500, 500, 50]), at_least=1)
    assert found.sum(0).tolist() == [500, 500, 50]
    assert found[:, 2].tolist() == [0, 0, 50]
    assert (found[:, 0] > 0).all()


@pytest.mark.parametrize("partition", ["dirichlet", "iid", "shards"])
def test_the_splits_of_all_partitions_follow_the_training_data(partition: str) -> None:
    labels = np.random.default_rng(0).permutation(np.arange(20_000) % 10)
    test = np.zeros(20_000, bool)
    test[:4000] = True  # an official test set of nearly the same balance
    for min_per_class in (0, 2) if partition == "dirichlet" else (0,):
        options = DataOptions(partition=partition, clients=8, min_per_class=min_per_class)  # type: ignore[arg-type]
        clients, _ = split(source_of(labels, test=test), options)
        train = counts_of(clients, labels, "train")
        assert train.min() >= min_per_class
        for name in ("val", "test"):
            found = counts_of(clients, labels, name)
            samples, distance = off(train, found)
            assert samples.max() <= 1 or name == "test"
            assert distance[found.sum(1) >= 200].max(initial=0) <= 0.05
            even = train.sum(1) / train.sum() * found.sum()
            assert partition == "dirichlet" or np.ptp(train.sum(1)) <= 2
            assert (np.abs(found.sum(1) - even) <= 0.15 * even + 5).all(), "sizes are not bent for so little"


# IID, shards.


def test_iid_parts_are_equal_and_alike() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        clients, supply = int(rng.integers(1, 30)), rng.integers(200, 2000, 10)
        counts = iid_counts(supply, clients, rng)
        assert counts.sum(0).tolist() == supply.tolist()
        assert np.ptp(counts.sum(1)) <= 1
        exact = supply * (1 / clients)
        assert (np.abs(counts - exact) <= 5.5 * np.sqrt(exact)).all(), "beyond chance"
        if clients > 5:
            assert np.abs(counts - exact).max() > 1, "shuffled, not stratified"


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("clients", [10, 20, 100])
def test_a_client_has_at_most_as_many_labels_as_shards(shards: int, clients: int) -> None:
    for seed in range(5):
        counts = shard_counts(np.full(10, 5000), clients, shards, rng_of(seed))
        assert ((counts > 0).sum(1) <= shards).all()
        assert (counts.sum(1) == 50_000 // clients).all()
        assert (counts.sum(0) == 5000).all()
    assert not np.array_equal(counts, shard_counts(np.full(10, 5000), clients, shards, rng_of(99))), "by chance"


def test_shards_across_the_end_of_a_class() -> None:
    for seed in range(30):
        rng = np.random.default_rng(seed)
        clients, shards = int(rng.integers(2, 20)), int(rng.integers(1, 4))
        supply = rng.integers(200, 1000, 8)
        counts = shard_counts(supply, clients, shards, rng)
        assert counts.sum(0).tolist() == supply.tolist()
        assert np.ptp(counts.sum(1)) <= shards
        if supply.sum() / (clients * shards) < 200:
            assert ((counts > 0).sum(1) <= 2 * shards).all()


@pytest.mark.parametrize("set", [{"partition": "iid"}, {"partition": "shards"}, {"partition": "dirichlet"}])
def test_more_clients_than_samples_are_refused(set: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"1000 clients need 2 .* lower DataOptions\.clients"):
        split(source_of(np.arange(1500) % 3), DataOptions(clients=1000, **set))


def test_more_shards_than_samples_are_refused() -> None:
    with pytest.raises(InputError, match=r"DataOptions\.shards=9 need 90 training samples but there are 80"):
        shard_counts(np.array([40, 40]), 10, 9, rng_of(0))


# Settings and the summary.


@pytest.mark.parametrize(
    ("set", "said"),
    [
        ({"min_per_class": -1}, "min_per_class must be at least 0, not -1"),
        ({"shards": 0}, "shards must be at least 1, not 0"),
        ({"meta_min": 0}, "meta_min must be at least 1, not 0"),
        ({"min_per_class": 2, "partition": "iid"}, r"min_per_class needs DataOptions\.partition=dirichlet, not iid"),
    ],
)
def test_bad_settings_are_refused(set: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DataOptions(**set)


def test_unlikeness_is_the_mean_over_pairs() -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, 9, (int(rng.integers(2, 12)), int(rng.integers(1, 7))))
        counts[:, 0] += 1
        shares = counts / counts.sum(1, keepdims=True)
        pairs = [0.5 * np.abs(a - b).sum() for i, a in enumerate(shares) for b in shares[:i]]
        assert unlikeness(counts) == pytest.approx(np.mean(pairs), abs=1e-12)
    assert unlikeness(np.array([[3, 1]])) == 0
    assert unlikeness(np.array([[3, 0], [0, 5]])) == 1
    start = time.process_time()
    assert 0 < unlikeness(np.random.default_rng(0).integers(0, 50, (500, 65))) < 1
    assert time.process_time() - start < 0.2
