"""Who holds what: partitions, batches, folders of images."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small import pixel_federation, pixels

from perada.data import DataOptions, Federation, build_federation, public_images, read_image
from perada.data.batches import ClientBatches, sample_stream, steps_of
from perada.data.digits import digits, glyphs
from perada.data.folder import folder
from perada.data.partition import deal, dirichlet, dirichlet_counts, feed, follow, holdout, largest_remainder
from perada.errors import InputError
from perada.lanes import fold, key_of, rng_of

CPU = torch.device("cpu")


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
    with pytest.raises(InputError, match=r"lower data\.clients"):
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
    with pytest.raises(InputError, match=r"data\.clients"):
        federation(clients=clients)


def test_as_many_clients_as_there_can_be_are_not_refused() -> None:
    labels = np.zeros(40, np.int64)
    index = np.arange(40)
    clients = dirichlet(labels, index[:20], index[20:30], index[30:], 10, 0.1, rng_of(0))
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
    with pytest.raises(InputError, match=r"distill\.data: 'no-such'"):
        public_images("no-such", 8)


# Folders of images.


def save(path: Path, pixels: Any, mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels, np.uint8)) if not isinstance(pixels, Image.Image) else pixels
    image.convert(mode).save(path)
    return path


def colour(red: int, green: int, blue: int, size: int = 8) -> np.ndarray:
    return np.broadcast_to(np.array([red, green, blue], np.uint8), (size, size, 3))


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    """north: 6 cats and 4 dogs; south: 5 birds and 5 dogs. Each image's red is its number."""
    number = 0
    for site, held in {"north": {"cat": 6, "dog": 4}, "south": {"bird": 5, "dog": 5}}.items():
        for name, count in held.items():
            for i in range(count):
                save(tmp_path / "data" / site / name / f"{i}.png", colour(number, 0, 255))
                number += 1
    return tmp_path / "data"


def test_site_class_image(sites: Path) -> None:
    f = build_federation(DataOptions(name="folder", root=str(sites), partition="site", size=8, val=0.2, test=0.2), CPU)
    assert [c.name for c in f.clients] == ["north", "south"]
    assert f.classes == ("bird", "cat", "dog")
    assert f.images.shape == (20, 3, 8, 8)
    for c, mine in zip(f.clients, (range(10), range(10, 20)), strict=True):
        numbers = f.images[np.concatenate([c.train, c.val, c.test]), 0, 0, 0]
        assert sorted(numbers.tolist()) == list(mine), "a site holds its own images and no others"
        assert len(c.test) == 2
        assert len(c.val) == 2
    wanted = ["cat"] * 6 + ["dog"] * 4 + ["bird"] * 5 + ["dog"] * 5
    order = f.images[:, 0, 0, 0].long()
    assert [f.classes[t] for t in f.targets[order.argsort()].tolist()] == wanted


def test_class_image_with_simulated_sites(sites: Path) -> None:
    options = DataOptions(name="folder", root=str(sites / "north"), clients=2, alpha=1.0, size=8, val=0.1, test=0.2)
    f = build_federation(options, CPU)
    assert f.classes == ("cat", "dog")
    assert [c.name for c in f.clients] == ["client-00", "client-01"]
    parts = [p for c in f.clients for p in (c.train, c.val, c.test)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))


def test_sites_may_be_mixed_into_simulated_ones(sites: Path) -> None:
    f = build_federation(DataOptions(name="folder", root=str(sites), clients=4, alpha=1.0, size=8), CPU)
    assert len(f.clients) == 4


def test_a_site_with_one_image_trains_on_it(sites: Path) -> None:
    save(sites / "west" / "cat" / "only.png", colour(99, 0, 0))
    f = build_federation(DataOptions(name="folder", root=str(sites), partition="site", size=8), CPU)
    west = f.clients[-1]
    assert (west.name, len(west.train), len(west.val), len(west.test)) == ("west", 1, 0, 0)


def test_the_server_may_hold_a_part_of_the_sites_data(sites: Path) -> None:
    options = DataOptions(name="folder", root=str(sites), partition="site", size=8, server_val=0.3)
    f = build_federation(options, CPU)
    parts = [p for c in f.clients for p in (c.train, c.val, c.test)] + [f.server_val]
    assert len(f.server_val) > 0
    assert sorted(np.concatenate(parts).tolist()) == list(range(20))


def test_grey_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    grey = save(tmp_path / "grey.png", np.full((8, 8), 77, np.uint8), "L")
    assert read_image(grey, 8).shape == (3, 8, 8)
    assert np.unique(read_image(grey, 8)).tolist() == [77]
    rgba = tmp_path / "rgba.png"
    Image.new("RGBA", (8, 8), (10, 20, 30, 255)).save(rgba)
    assert read_image(rgba, 8)[:, 0, 0].tolist() == [10, 20, 30]
    palette = save(tmp_path / "palette.gif", colour(255, 0, 0), "P")
    assert read_image(palette, 8).shape == (3, 8, 8)
    bilevel = save(tmp_path / "bilevel.png", np.full((8, 8), 255, np.uint8), "1")
    assert np.unique(read_image(bilevel, 8)).tolist() == [255]
    jpeg = save(tmp_path / "photo.JPG", colour(200, 200, 200))
    assert np.abs(read_image(jpeg, 8).astype(int) - 200).max() <= 2


def test_sixteen_bit_grey_keeps_its_shades(tmp_path: Path) -> None:
    """X-rays come so. Cut off at 255 of 65,535 they are white."""
    ramp = np.tile(np.linspace(0, 65535, 8).astype(np.uint16), (8, 1))
    Image.fromarray(ramp).save(tmp_path / "xray.png")
    found = read_image(tmp_path / "xray.png", 8)[0, 0].astype(int)
    assert np.abs(found - np.linspace(0, 255, 8)).max() <= 2


def test_an_image_is_scaled_by_its_shorter_side_and_cropped_in_the_middle(tmp_path: Path) -> None:
    wide = np.zeros((16, 64, 3), np.uint8)
    wide[:, 24:40, 1] = 255  # the middle square is green
    found = read_image(save(tmp_path / "wide.png", wide), 8)
    assert found.shape == (3, 8, 8)
    assert found[1].min() > 200 or found[1, :, 2:-2].min() == 255
    tall = read_image(save(tmp_path / "tall.png", wide.transpose(1, 0, 2)), 8)
    assert np.array_equal(tall, found.transpose(0, 2, 1))
    assert read_image(save(tmp_path / "tiny.png", colour(9, 9, 9, size=1)), 8).shape == (3, 8, 8)


def test_an_unreadable_file_is_named(sites: Path) -> None:
    (sites / "north" / "cat" / "bad.png").write_bytes(b"\x89PNG nonsense")
    with pytest.raises(InputError, match=r"north/cat/bad\.png.*data\.skip_bad=true"):
        folder(str(sites), 8, skip_bad=False)
    source = folder(str(sites), 8, skip_bad=True)
    assert len(source.images) == len(source.targets) == 20
    for i in range(5):
        (sites / "south" / "dog" / f"bad{i}.jpg").write_bytes(b"")
    with pytest.raises(InputError, match="and 3 more"):
        folder(str(sites), 8, skip_bad=False)


def test_an_image_cut_in_half_is_unreadable(sites: Path) -> None:
    whole = save(sites / "north" / "cat" / "cut.png", np.random.default_rng(0).integers(0, 255, (64, 64, 3)))
    whole.write_bytes(whole.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"cut\.png"):
        folder(str(sites), 8, skip_bad=False)


def test_skipping_everything_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "bad.png").write_bytes(b"x")
    with pytest.raises(InputError, match=r"bad\.png"):
        folder(str(tmp_path), 8, skip_bad=True)


def test_other_files_are_passed_over(sites: Path) -> None:
    (sites / "README.md").write_text("hello")
    (sites / "north" / "cat" / "Thumbs.db").write_bytes(b"x")
    (sites / "north" / ".DS_Store").write_bytes(b"x")
    assert len(folder(str(sites), 8, skip_bad=False).images) == 20


def test_hidden_files_that_look_like_images_are_passed_over(sites: Path) -> None:
    """macOS leaves `._photo.png` beside photo.png on foreign disks: no image, and no reason to stop."""
    (sites / "north" / "cat" / "._0.png").write_bytes(b"\x00\x05\x16\x07")
    assert len(folder(str(sites), 8, skip_bad=False).images) == 20


@pytest.mark.parametrize("depth", [1, 4])
def test_images_too_high_or_too_deep_are_refused(tmp_path: Path, depth: int) -> None:
    save(tmp_path.joinpath(*"abcd"[: depth - 1], "x.png"), colour(1, 2, 3))
    with pytest.raises(InputError, match=r"site/class/image\.png"):
        folder(str(tmp_path), 8, skip_bad=False)
