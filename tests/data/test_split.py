"""Who holds which samples, whatever is asked for: every one once, in splits, categories and sites."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CPU

from perada import data
from perada.config import resolve
from perada.data import Client, DataOptions, Federation, Source, build_federation
from perada.data.split import categories, split
from perada.errors import InputError

from .parts import counts_of, off, source_of

SPLITS = ("train", "val", "test")


def lists(clients: Sequence[Client]) -> list[list[int]]:
    return [getattr(c, s).tolist() for c in clients for s in SPLITS]


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
    with pytest.raises(InputError, match="each site needs 2 training images, but there has 0: "):
        build_federation(DataOptions(partition="site"), CPU)


def test_a_site_with_one_training_image_is_refused_as_in_every_other_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would not be trained, and what it was sent averaged in as if it were its own."""
    for alone in (1, 2):
        site = np.repeat(["here", "there"], [50, alone])
        source = source_of(np.arange(50 + alone) % 2, site=site)
        monkeypatch.setitem(data.SOURCES, "digits", lambda *_, source=source: source)
        if alone == 1:
            with pytest.raises(
                InputError, match="2 training images, but there has 1: give it more images, leave it out"
            ):
                build_federation(DataOptions(partition="site"), CPU)
        else:
            assert [c.name for c in build_federation(DataOptions(partition="site"), CPU).clients] == ["here", "there"]


def test_office_home_is_split_as_in_the_paper() -> None:
    """12,541 / 1,656 / 1,391 of 15,588 images in four domains."""
    sizes = {"Art": 2427, "Clipart": 4365, "Product": 4439, "Real World": 4357}
    site = np.repeat(list(sizes), list(sizes.values()))
    images, targets = np.zeros((len(site), 3, 8, 8), np.uint8), np.arange(len(site)) % 65
    source = Source("office-home", images, targets, tuple(map(str, range(65))), site=site)
    clients = build_federation(resolve("office-home", {}).data, CPU, source).clients
    assert [sum(len(getattr(c, s)) for c in clients) for s in ("train", "test", "val")] == [12_541, 1_656, 1_391]
