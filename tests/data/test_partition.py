"""Who holds what, whatever is asked for: partitions as properties over many random settings."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from perada import data
from perada.config import resolve
from perada.data import Client, DataOptions, Federation, Source, build_federation
from perada.data.partition import (
    dirichlet_counts,
    feed,
    follow,
    iid_counts,
    largest_remainder,
    shard_counts,
)
from perada.data.split import categories, split
from perada.errors import InputError
from perada.lanes import rng_of
from perada.tables import unlikeness

CPU = torch.device("cpu")
SPLITS = ("train", "val", "test")


def source_of(targets: Any, **more: Any) -> Source:
    """A data set with these targets; an image's pixels are its own number in base 256."""
    targets = np.asarray(targets)
    number = np.arange(len(targets))
    images = np.stack([number // 256, number % 256], 1).astype(np.uint8).reshape(-1, 1, 1, 2)
    kind = np.uint8 if targets.ndim == 2 else np.int64
    many = targets.shape[1] if targets.ndim == 2 else int(targets.max()) + 1
    return Source("made", images, targets.astype(kind), tuple(f"c{i}" for i in range(many)), **more)


def counts_of(clients: Sequence[Client], labels: np.ndarray, split: str) -> np.ndarray:
    return np.stack([np.bincount(labels[getattr(c, split)], minlength=int(labels.max()) + 1) for c in clients])


def lists(clients: Sequence[Client]) -> list[list[int]]:
    return [getattr(c, s).tolist() for c in clients for s in SPLITS]


def off(train: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples off the largest-remainder rounding of each client's own proportions, and total variation."""
    shares = train / train.sum(1, keepdims=True)
    wanted = np.stack([largest_remainder(p, int(n)) for p, n in zip(shares, found.sum(1), strict=True)])
    distance = 0.5 * np.abs(found / np.maximum(found.sum(1, keepdims=True), 1) - shares).sum(1)
    return np.abs(found - wanted), distance


def settle(seed: int) -> tuple[Source, dict[str, Any]]:
    """A data set and settings that can be met, drawn by `seed`."""
    rng = np.random.default_rng(seed)
    classes, clients, alpha = int(rng.integers(1, 12)), int(rng.integers(1, 25)), 10 ** rng.uniform(-6, 6)
    least = int(rng.integers(0, 3))
    each = rng.integers(4 * clients * (least + 2), 4 * clients * (least + 2) + 100, classes)
    targets = rng.permutation(np.repeat(np.arange(classes), each))
    kind = str(rng.choice(["dirichlet", "dirichlet", "iid", "shards", "site"]))
    more: dict[str, Any] = {}
    for mask in ("test", "val"):
        if rng.random() < 0.4:
            more[mask] = rng.random(len(targets)) < 0.2
    if kind == "site":
        more["site"] = np.array([f"s{i:02d}" for i in range(clients)])[rng.permutation(len(targets)) % clients]
    if rng.random() < 0.3:  # multi-label: each class a combination
        targets = (targets[:, None] + 1) >> np.arange(4) & 1
    set = {
        "partition": kind,
        "clients": clients,
        "alpha": alpha,
        "cap": bool(rng.random() < 0.5),
        "min_per_class": least if kind == "dirichlet" else 0,
        "shards": int(rng.integers(1, 4)),
        "meta_min": int(rng.integers(1, 40)),
        "val": rng.uniform(0, 0.2),
        "test": rng.uniform(0, 0.2),
        "server_val": float(rng.choice([0, 0.1])),
        "seed": seed,
    }
    return source_of(targets, **more), set


# Byte for byte.


def digest(f: Federation) -> str:
    parts = [p.astype("<i8").tobytes() + b"|" for c in f.clients for p in (c.train, c.val, c.test)]
    return hashlib.sha256(b"".join(parts) + f.server_val.astype("<i8").tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("set", "pinned"),
    [
        ({}, "67d31a712ceddcc35093f25601e518c411d3a46f19a65ace3546707533082ef9"),
        ({"data.seed": 1}, "d5b12da72703fe311587bed7c1e62322ac8febffa1d03f056705a7f47c86a66b"),
        (
            {"data.clients": 100, "data.server_val": 0.1},
            "0c1d9599977a243e61abe6161b7cd86d5233433894999c3d0f0e93d99cf4f39f",
        ),
    ],
)
def test_the_split_of_the_digits_is_that_of_the_first_release(set: dict[str, Any], pinned: str) -> None:
    """The README's numbers, and old runs that are resumed or reported on, depend on it. Taken from the code
    before there were other partitions."""
    assert digest(build_federation(resolve("digits", set).data, CPU)) == pinned


# Whatever is asked for.


@pytest.mark.parametrize("block", range(8))
def test_every_sample_goes_to_exactly_one_place_and_no_client_is_empty(block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        source, set = settle(seed)
        clients, server = split(source, DataOptions(**set))
        every = np.concatenate([*(getattr(c, s) for c in clients for s in SPLITS), server])
        assert np.array_equal(np.sort(every), np.arange(len(source.images))), set
        assert len(clients) == set["clients"], set
        assert min(len(c.train) for c in clients) >= 2, set
        assert len({c.name for c in clients}) == len(clients), set
        assert all(np.array_equal(part, np.sort(part)) for c in clients for part in (c.train, c.val, c.test)), set
        if set["partition"] != "site":
            for name in ("val", "test"):
                sizes = [len(getattr(c, name)) for c in clients]
                assert min(sizes) >= (sum(sizes) >= len(clients)), set


@pytest.mark.parametrize("block", range(4))
def test_a_seed_reproduces_and_another_one_differs(block: int) -> None:
    for seed in range(200 + block * 8, 208 + block * 8):
        source, set = settle(seed)
        set.update(val=0.1, test=0.1)  # or a site with declared splits has nothing to draw
        if set["partition"] == "site" and source.val is not None and source.test is not None:
            continue
        if set["clients"] == 1 and source.test is not None and source.val is not None and not set["server_val"]:
            continue
        first, again, other = (split(source, DataOptions(**{**set, "seed": s})) for s in (seed, seed, seed + 1))
        assert lists(first[0]) == lists(again[0])
        assert first[1].tolist() == again[1].tolist()
        assert lists(first[0]) != lists(other[0])


@pytest.mark.parametrize("partition", ["dirichlet", "iid", "shards", "site"])
@pytest.mark.parametrize("multilabel", [False, True])
def test_every_client_really_gets_its_own_samples(
    partition: str, multilabel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By number of the sample, not by place in some list: its images and targets are those that were dealt to it.

    Indices into a client's own list, taken for indices into the pool, would give everybody the first samples.
    """
    rng = np.random.default_rng(3)
    kinds = rng.permutation(np.repeat(np.arange(4), 150))
    site = np.array(["a", "b", "c", "d"])[kinds]
    source = source_of((kinds[:, None] >> np.arange(2)) & 1 if multilabel else kinds, site=site)
    monkeypatch.setitem(data.SOURCES, "digits", lambda *_: source)
    f = build_federation(
        DataOptions(partition=partition, clients=4, alpha=1e-6, shards=1, meta_min=50),
        CPU,  # type: ignore[arg-type]
    )
    seen: list[int] = []
    for c in f.clients:
        for part in (c.train, c.val, c.test):
            number = f.images[part, 0, 0].long() @ torch.tensor([256, 1])
            assert number.tolist() == part.tolist()
            assert np.array_equal(f.targets[part].numpy(), source.targets[part])
            seen += number.tolist()
        if partition == "site":
            assert set(site[np.concatenate([c.train, c.val, c.test])]) == {c.name}
        if partition in ("site", "shards"):
            assert len(np.unique(kinds[np.concatenate([c.train, c.val, c.test])])) == 1
    assert sorted(seen) == list(range(600))
    if partition != "iid":
        assert counts_of(f.clients, kinds, "train").max() >= 100, "the partition was not ignored"


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
        InputError, match=r"^data\.min_per_class=2 needs 20 .* class 1 has 19: lower data\.min_per"
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
    with pytest.raises(InputError, match=r"1000 clients need 2 .* lower data\.clients"):
        split(source_of(np.arange(1500) % 3), DataOptions(clients=1000, **set))


def test_more_shards_than_samples_are_refused() -> None:
    with pytest.raises(InputError, match=r"data\.shards=9 need 90 training samples but there are 80"):
        shard_counts(np.array([40, 40]), 10, 9, rng_of(0))


# Meta-categories.

COMBINATIONS = np.repeat([[0, 0, 0], [0, 1, 0], [1, 0, 1], [1, 1, 1], [0, 0, 1]], [30, 20, 12, 3, 2], axis=0)


def test_frequent_combinations_are_categories_and_the_rest_one_more() -> None:
    source = source_of(COMBINATIONS)
    every = np.arange(67)
    assert categories(source, every, 12).tolist() == [0] * 30 + [1] * 20 + [2] * 12 + [3] * 5
    assert categories(source, every, 13).tolist() == [0] * 30 + [1] * 20 + [2] * 17
    assert np.bincount(categories(source, every, 1)).tolist() == [30, 2, 20, 12, 3], "all of them, no rest"
    assert set(categories(source, every, 2000).tolist()) == {0}


def test_only_training_images_count() -> None:
    source = source_of(COMBINATIONS)
    train = np.arange(0, 67, 2)  # 15, 10, 6 and a few
    assert categories(source, train, 7).tolist() == [0] * 30 + [1] * 20 + [2] * 17


def test_plain_labels_are_their_own_categories() -> None:
    assert categories(source_of([2, 0, 1, 0]), np.arange(4), 2000).tolist() == [2, 0, 1, 0]


def test_the_dirichlet_partition_of_multi_label_data_is_over_meta_categories() -> None:
    """With a tiny α and no cap each category goes to one client; the single labels overlap."""
    targets = np.random.default_rng(0).permutation(np.repeat(COMBINATIONS, 20, axis=0))
    source = source_of(targets)
    options = DataOptions(clients=3, alpha=1e-6, cap=False, meta_min=100)
    clients, _ = split(source, options)
    kinds = categories(source, np.concatenate([c.train for c in clients]), 100)
    assert kinds.max() == 3
    train = counts_of(clients, kinds, "train")
    assert np.allclose((train > 2).sum(0), 1), "two samples may feed an empty client"
    for name in ("val", "test"):
        assert off(train, counts_of(clients, kinds, name))[0].max() <= 1


def test_a_combination_that_holding_out_brings_below_the_threshold_is_pooled() -> None:
    """Of 100 images 70 are left to train on: with 80 asked for, two such combinations are one category and (with a
    tiny α) go to one client."""
    targets = np.repeat([[0, 0], [0, 1], [1, 0]], [1000, 100, 100], axis=0)
    for seed in range(8):
        clients, _ = split(source_of(targets), DataOptions(clients=6, alpha=1e-6, cap=False, meta_min=80, seed=seed))
        held = counts_of(clients, targets @ [2, 1], "train")
        assert held[:, 1].argmax() == held[:, 2].argmax()


def test_one_category_is_allowed_and_held_out_data_are_stratified() -> None:
    targets = np.repeat(COMBINATIONS, 20, axis=0)
    clients, _ = split(source_of(targets), DataOptions(clients=5))  # meta_min 2000: all pooled
    assert sum(len(c.train) for c in clients) == 1340 - 134 - 268
    clients, _ = split(source_of(targets), DataOptions(clients=5, meta_min=100))
    held = np.concatenate([c.test for c in clients])
    assert [int((targets[held] == row).all(1).sum()) for row in COMBINATIONS[[0, 30, 50]]] == [120, 80, 48]


# Sites.


def test_declared_splits_are_used_and_a_site_without_them_holds_out_its_own() -> None:
    site = np.repeat(["both", "neither", "only test", "only val"], 100)
    test, val = np.zeros(400, bool), np.zeros(400, bool)
    test[:30], val[30:50] = True, True
    test[200:240] = True
    val[300:350] = True
    source = source_of(np.arange(400) % 2, site=site, test=test, val=val)
    clients, _ = split(source, DataOptions(partition="site", test=0.2, val=0.1))
    found = {c.name: c for c in clients}
    assert found["both"].test.tolist() == list(range(30))
    assert found["both"].val.tolist() == list(range(30, 50))
    assert found["only test"].test.tolist() == list(range(200, 240))
    assert found["only val"].val.tolist() == list(range(300, 350))
    sizes = {c.name: [len(getattr(c, s)) for s in SPLITS] for c in clients}
    # A share of all a site has where it declares nothing, else of what it has not declared.
    assert sizes == {
        "both": [50, 20, 30],
        "neither": [70, 10, 20],
        "only test": [54, 6, 40],
        "only val": [40, 50, 10],
    }


def test_declared_validation_data_are_used_by_every_partition() -> None:
    val = np.arange(1000) % 8 == 0
    test = np.arange(1000) % 4 == 0  # every validation sample is declared for testing, too: testing wins
    clients, _ = split(source_of(np.arange(1000) % 5, val=val), DataOptions(clients=4, alpha=1.0))
    assert np.array_equal(np.sort(np.concatenate([c.val for c in clients])), np.flatnonzero(val))
    assert sum(len(c.test) for c in clients) == 175
    clients, _ = split(source_of(np.arange(1000) % 5, val=val, test=test), DataOptions(clients=4, alpha=1.0))
    assert np.array_equal(np.sort(np.concatenate([c.test for c in clients])), np.flatnonzero(test))
    assert sum(len(c.val) for c in clients) == 75


def test_a_site_that_only_tests_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    site = np.repeat(["here", "there"], 50)
    source = source_of(np.arange(100) % 2, site=site, test=site == "there")
    monkeypatch.setitem(data.SOURCES, "digits", lambda *_: source)
    with pytest.raises(InputError, match="no training data at there"):
        build_federation(DataOptions(partition="site"), CPU)


# Settings and the summary.


@pytest.mark.parametrize(
    ("set", "said"),
    [
        ({"min_per_class": -1}, "min_per_class must be at least 0, not -1"),
        ({"shards": 0}, "shards must be at least 1, not 0"),
        ({"meta_min": 0}, "meta_min must be at least 1, not 0"),
        ({"min_per_class": 2, "partition": "iid"}, r"min_per_class is for data\.partition=dirichlet, not iid"),
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
