"""Who holds what: partitions and batches; and images as numbers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CPU
from small import pixel_federation, pixels

from perada.data import DataOptions, Federation, build_federation, public_images
from perada.data.batches import ClientBatches, sample_stream, steps_of
from perada.data.digits import digits, glyphs
from perada.data.partition import deal, dirichlet_counts, feed, follow, hand_out, holdout, largest_remainder
from perada.errors import InputError
from perada.lanes import fold, key_of, rng_of


def federation(**set: Any) -> Federation:
    return build_federation(DataOptions(**set), CPU)


def counts_of(f: Federation, split: str) -> np.ndarray:
    targets = f.targets.numpy()
    return np.stack([np.bincount(targets[getattr(c, split)], minlength=len(f.classes)) for c in f.clients])


# Partitions.


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("set", [{}, {"clients": 3, "cap": False}, {"clients": 100, "server_val": 0.1}])
def test_every_sample_is_used_exactly_once(alpha: float, set: dict[str, Any]) -> None:
    f = federation(alpha=alpha, **set)
    parts = [p for c in f.clients for p in (c.train, c.val, c.test)] + [f.server_val]
    assert sorted(np.concatenate(parts).tolist()) == list(range(1797))
    assert all(len(c.train) >= 2 and len(c.val) >= 1 and len(c.test) >= 1 for c in f.clients)
    assert len(f.clients) == set.get("clients", 20)


def test_every_client_really_gets_its_own_indices() -> None:
    """An index list by local position instead of by sample shows as clients with everybody's classes."""
    f = federation(alpha=1e-3, clients=10, cap=False)
    own = [np.unique(f.targets.numpy()[c.train]) for c in f.clients]
    assert np.median([len(classes) for classes in own]) <= 2
    counts = f.label_counts()
    assert np.array_equal(counts, counts_of(f, "train"))
    assert counts.sum() == sum(len(c.train) for c in f.clients)


def test_shares_of_the_splits_are_those_asked_for() -> None:
    f = federation(val=0.15, test=0.25, server_val=0.1)
    sizes = [sum(len(getattr(c, s)) for c in f.clients) for s in ("train", "val", "test")]
    assert sizes[1] / 1797 == pytest.approx(0.15, abs=0.005)
    assert sizes[2] / 1797 == pytest.approx(0.25, abs=0.005)
    assert len(f.server_val) / (len(f.server_val) + sizes[0]) == pytest.approx(0.1, abs=0.005)
    every = np.bincount(f.targets.numpy(), minlength=10)
    held = np.bincount(f.targets.numpy()[f.test], minlength=10)
    assert np.abs(held - 0.25 * every).max() <= 0.5, "stratified"


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("seed", range(5))
def test_validation_and_test_data_follow_the_training_proportions(split: str, seed: int) -> None:
    """Class by class the largest remainder: at most one sample off the exact share. Feeding a client that would
    be left with nothing moves one sample each."""
    f = federation(alpha=0.1, seed=seed)
    train, found = counts_of(f, "train"), counts_of(f, split)
    exact = train / np.maximum(train.sum(0), 1) * found.sum(0)
    fed = int((np.floor(exact).sum(1) == 0).sum())
    off = np.abs(found - exact)
    assert (off > 1 + 1e-9).sum() <= 2 * fed
    assert off.max() <= 2 + fed


def test_follow_by_hand() -> None:
    """Training 6:3:1 of class 0 and 0:0:5 of class 1; 5 and 4 test samples: 3, 1.5→2 (the larger remainder), 0.5→0."""
    train = np.array([[6, 0], [3, 0], [1, 5]])
    assert follow(train, np.array([5, 4])).tolist() == [[3, 0], [2, 0], [0, 4]]


def test_a_class_that_nobody_trains_on_is_dealt_out_evenly() -> None:
    assert follow(np.array([[4, 0], [4, 0]]), np.array([2, 6])).tolist() == [[1, 3], [1, 3]]


def test_largest_remainder_by_hand() -> None:
    assert largest_remainder(np.array([0.5, 0.25, 0.25]), 10).tolist() == [5, 3, 2]  # 5, 2.5, 2.5: a tie, lower first
    assert largest_remainder(np.array([1.0, 1.0, 1.0]), 2).tolist() == [1, 1, 0]
    assert largest_remainder(np.array([0.0, 1e-300]), 7).tolist() == [0, 7]
    assert largest_remainder(np.array([3.0, 1.0]), 0).tolist() == [0, 0]


def test_feeding_takes_from_the_richest_and_prefers_the_clients_own_classes() -> None:
    own = np.array([[0, 4], [9, 9], [9, 9]])
    fed = feed(np.array([[0, 0], [9, 3], [2, 5]]), 2, own)
    assert fed[0].tolist() == [0, 2], "of class 1, which client 0 trains on"
    assert fed.sum(0).tolist() == [11, 8]
    assert fed[2].tolist() == [2, 3] or fed[2, 1] == 4  # it had the most of class 1
    with pytest.raises(InputError, match=r"lower DataOptions\.clients"):
        feed(np.array([[0], [1]]), 1, np.array([[1], [1]]))


def test_dealing_gives_everybody_what_the_counts_say() -> None:
    labels = np.array([0, 1] * 10)
    pool = np.arange(4, 20)
    counts = np.array([[3, 0], [5, 2], [0, 6]])
    parts = deal(counts, labels, pool, rng_of(0))
    assert sorted(np.concatenate(parts).tolist()) == pool.tolist()
    assert [np.bincount(labels[p], minlength=2).tolist() for p in parts] == counts.tolist()


def test_a_seed_reproduces_a_split_and_another_one_does_not() -> None:
    a, b, c = (federation(seed=s) for s in (0, 0, 1))
    assert all(
        np.array_equal(x.train, y.train) and np.array_equal(x.test, y.test)
        for x, y in zip(a.clients, b.clients, strict=True)
    )
    assert any(not np.array_equal(x.train, y.train) for x, y in zip(a.clients, c.clients, strict=True))


def test_a_smaller_alpha_makes_clients_less_alike() -> None:
    def classes(alpha: float) -> float:
        return float(np.mean([(row > 0).sum() for row in federation(alpha=alpha).label_counts()]))

    assert classes(0.01) < classes(0.1) < classes(1.0) < classes(100.0)


@pytest.mark.parametrize("alpha", [1e-6, 1e-100, 1e-300, 1e-320])
def test_a_tiny_alpha_works_and_is_fast(alpha: float) -> None:
    """Gamma draws of so small an α are all zero in floating point: 0/0. 1e-320 is not even normal."""
    start = time.process_time()  # not the wall's clock: other work on the machine is no fault
    counts = dirichlet_counts(np.full(10, 5000), 100, alpha, rng_of(0))
    assert time.process_time() - start < 1
    assert counts.sum(0).tolist() == [5000] * 10
    assert counts.sum(1).min() >= 2
    assert counts.min() >= 0


def test_a_huge_alpha_is_an_even_split() -> None:
    counts = dirichlet_counts(np.full(10, 1000), 20, 1e12, rng_of(0))
    assert counts.min() >= 49
    assert counts.max() <= 51


@pytest.mark.parametrize("seed", range(8))
def test_the_cap_is_kept_within_one_class(seed: int) -> None:
    """A client that reached N/M takes no part in the classes still to come; the last one may carry it over."""
    supply = np.array([180, 20, 75, 300, 5, 120])
    counts = dirichlet_counts(supply, 10, 0.05, rng_of(seed), cap=True)
    for row in counts:
        assert row.sum() < supply.sum() / 10 + row.max() + 2
    free = dirichlet_counts(supply, 10, 0.05, rng_of(seed), cap=False)
    assert free.sum(0).tolist() == counts.sum(0).tolist() == supply.tolist()


def test_the_cap_makes_sizes_more_alike() -> None:
    spread = {
        cap: np.mean([dirichlet_counts(np.full(10, 100), 20, 0.05, rng_of(s), cap).sum(1).std() for s in range(60)])
        for cap in (True, False)
    }
    assert spread[True] < 0.8 * spread[False]


@pytest.mark.parametrize("clients", [900, 1797, 10**9])
def test_more_clients_than_samples_are_refused(clients: int) -> None:
    with pytest.raises(InputError, match=r"DataOptions\.clients"):
        federation(clients=clients)


def test_as_many_clients_as_there_can_be_are_not_refused() -> None:
    labels = np.zeros(40, np.int64)
    index = np.arange(40)
    counts = dirichlet_counts(np.array([20]), 10, 0.1, rng_of(0))
    clients = hand_out(counts, labels, index[:20], index[20:30], index[30:], rng_of(0))
    assert [len(c.train) for c in clients] == [2] * 10
    assert [len(c.val) for c in clients] == [1] * 10


def test_names_of_many_clients_sort_as_numbers() -> None:
    names = [c.name for c in federation(clients=101).clients]
    assert names[0] == "client-000"
    assert names == sorted(names)


def test_holdout_is_stratified_and_rounds() -> None:
    labels = np.array([0] * 10 + [1] * 5)
    found = holdout(labels, np.arange(15), 0.3, rng_of(0))  # 4.5 of 15: four, of which 2.67 and 1.33
    assert np.bincount(labels[found]).tolist() == [3, 1]
    many = np.repeat(np.arange(10), 4)  # ten classes of four: a tenth of each would round to nothing
    assert len(holdout(many, np.arange(40), 0.1, rng_of(0))) == 4
    assert holdout(labels, np.arange(15), 0.0, rng_of(0)).tolist() == []
    assert holdout(labels, np.arange(0), 0.3, rng_of(0)).tolist() == []


# Batches.


@pytest.mark.parametrize(("samples", "steps"), [(1, 1), (15, 1), (16, 1), (17, 2), (160, 10), (0, 1)])
def test_the_number_of_steps(samples: int, steps: int) -> None:
    """epochs · max(1, ceil(n/B))."""
    assert steps_of(samples, 16, 1) == steps
    assert steps_of(samples, 16, 5) == 5 * steps


def test_a_stream_is_one_permutation_after_another() -> None:
    train = np.array([3, 14, 15, 92, 65])
    stream = sample_stream(train, 13, 0, 0, 0)
    for i in (0, 5):
        assert sorted(stream[i : i + 5].tolist()) == sorted(train.tolist())
    assert len(set(stream[10:].tolist())) == 3
    assert stream[:5].tolist() != stream[5:10].tolist()
    assert sample_stream(train, 7, 0, 0, 0).tolist() == stream[:7].tolist(), "a longer stream starts the same"
    for key in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        assert sample_stream(train, 13, *key).tolist() != stream.tolist()


def test_a_batch_is_always_full_and_of_the_lanes_own_client() -> None:
    f = pixel_federation([(1, 0)], [(2, 1), (3, 1), (4, 0)], [(v, 0) for v in range(10, 21)])
    lanes, batch = [2, 0, 1, 2], 4
    steps = [steps_of(len(f.clients[c].train), batch, 2) for c in lanes]
    assert steps == [6, 2, 2, 6]
    make = ClientBatches(f, lanes, steps, batch, seed=0, round=0, dtype=torch.float64)
    seen: dict[int, list[int]] = {k: [] for k in range(4)}
    for step in range(6):
        active = [k for k in range(4) if step < steps[k]]
        found = make(step, torch.tensor(active))
        assert found.images.shape == (len(active) * batch, 3, 1, 1)
        assert found.targets.shape == (len(active), batch)
        assert found.weights is None, "all ones"
        values = torch.round(found.images[:, 0, 0, 0] * 255 / 2).long().view(len(active), batch)
        for row, k in zip(values.tolist(), active, strict=True):
            own = f.images[f.clients[lanes[k]].train].flatten().tolist()
            assert set(row) <= set(own)
            seen[k] += row
            place = [f.images.flatten().tolist().index(v) for v in row]
            assert found.targets[active.index(k)].tolist() == f.targets[place].tolist(), "labels go with their images"
    assert sorted(seen[0][:11]) == list(range(10, 21)), "the first epoch covers all samples"
    assert seen[0] == seen[3], "two lanes of one client see the same"
    assert seen[1] == [1] * 8


def test_a_lanes_random_key_is_of_seed_round_client_and_step() -> None:
    f = pixel_federation([(1, 0)], [(2, 1)])
    make = ClientBatches(f, [1, 0, 1], [2, 2, 2], 2, seed=5, round=7, dtype=torch.float32)
    keys = make(1, torch.tensor([0, 1, 2])).keys
    wanted = [int(fold(torch.tensor([key_of(5, 7, f.clients[c].name, "step")]), 1)) for c in (1, 0, 1)]
    assert keys.tolist() == wanted


# Images to numbers.


def test_prepare_normalises_and_makes_grey_three_channels() -> None:
    f = pixel_federation([(0, 0), (255, 1)])
    found = f.prepare(pixels(0, 51, 255), torch.float64)
    assert found.shape == (3, 3, 1, 1)
    assert found.dtype == torch.float64
    assert found[:, :, 0, 0].tolist() == [[0.0] * 3, [0.4] * 3, [2.0] * 3]


def test_prepare_normalises_each_colour_with_its_own_numbers() -> None:
    source = digits()
    f = Federation(
        "x",
        torch.zeros(1, 3, 2, 2, dtype=torch.uint8),
        torch.zeros(1),
        source.classes,
        (),
        (0.0, 0.5, 1.0),
        (1.0, 0.5, 0.25),
    )
    found = f.prepare(torch.full((2, 3, 2, 2), 255, dtype=torch.uint8), torch.float32)
    assert found[0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]


def test_digits_are_the_real_ones() -> None:
    source = digits()
    assert source.images.shape == (1797, 1, 8, 8)
    assert source.images.dtype == np.uint8
    assert np.bincount(source.targets).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (source.images.min(), source.images.max()) == (0, 255)


def test_public_images_by_name() -> None:
    assert public_images("none", 8) is None
    found = public_images("glyphs", 8)
    assert found is not None
    assert tuple(found.shape) == glyphs().shape == (4096, 1, 8, 8)
    whole = public_images("digits", 8)
    assert whole is not None
    assert len(whole) == 1797
    with pytest.raises(InputError, match=r"Distill\.data: 'no-such' .* one of: none, glyphs"):
        public_images("no-such", 8)
