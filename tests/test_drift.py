"""Predictions that notice drift: the formulas against loops, hand-made numbers and known answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close_norm
from small import double
from torch import Tensor

from perada.errors import InputError
from perada.predict.calibrate import MIXES, TEMPERATURES, calibrated
from perada.predict.drift import (
    Answer,
    Calibration,
    Drift,
    answer,
    at_home,
    balanced,
    distance,
    everywhere,
    farthest,
    home_share,
    label_prior,
    likeness,
    mean_prior,
    mixed,
    uniform_prior,
    windows_of,
)
from perada.predict.predictor import Answers, Predictor, Stream

HALF = (0.5, 0.5)
BY = Calibration((0.8, 0.2), HALF, mix=0.5, temperature=2.0, mean=0.3, deviation=0.4, images=16)


def test_formulas_by_hand() -> None:
    """One image; a = 1/2, τ = 2, so b is half of v less log P/g, and a quarter of w."""
    v, w = double([1.0, 0.0]), double([2.0, 4.0])
    raw = [0.5 * (1 - math.log(1.6)) + 0.25 * 2, 0.5 * (0 - math.log(0.4)) + 0.25 * 4]
    norm = math.log(math.exp(raw[0]) + math.exp(raw[1]))
    b = balanced(BY, v, w)
    assert b[0].tolist() == pytest.approx([raw[0] - norm, raw[1] - norm])
    s = math.log(math.exp(raw[0] - norm) * 1.6 + math.exp(raw[1] - norm) * 0.4)
    assert likeness(BY, b).tolist() == pytest.approx([s])
    z = (0.3 - (s + 0.1) / 2) / (0.4 * (1 / math.sqrt(2) + 1 / 4))
    assert float(distance(BY, torch.tensor([s, 0.1], dtype=torch.float64))) == pytest.approx(z)


def test_the_farthest_z_is_that_of_images_which_are_surely_of_the_rarest_class() -> None:
    s = torch.full((9,), math.log(0.4), dtype=torch.float64)
    assert BY.least == pytest.approx(math.log(0.4))
    assert farthest(BY, 9) == pytest.approx(float(distance(BY, s)))
    assert farthest(BY, math.inf) == pytest.approx((0.3 - math.log(0.4)) / (0.4 / 4))
    assert farthest(replace(BY, images=0), 9) == farthest(replace(BY, deviation=0.0), 9) == 0
    some = likeness(BY, balanced(BY, *(100 * torch.randn(2, 500, 2, generator=torch.Generator().manual_seed(0)))))
    assert float(some.min()) >= BY.least - 1e-9
    labels = Calibration((0.8, 0.1), HALF, multilabel=True)
    assert labels.least == pytest.approx(math.log(0.4) + math.log(0.2))  # not the first, and the second
    sure = torch.tensor([[-50.0, 50.0]], dtype=torch.float64)
    assert likeness(labels, sure).tolist() == pytest.approx([labels.least])


def test_the_home_share_is_where_em_ends() -> None:
    draw = torch.Generator().manual_seed(0)
    for n in (1, 2, 8, 32):
        s = torch.randn(20, n, generator=draw, dtype=torch.float64)
        share = torch.full((20, 1), 0.5, dtype=torch.float64)
        for _ in range(20_000):
            share = (share * s.exp() / (share * s.exp() + 1 - share)).mean(-1, keepdim=True)
        assert torch.allclose(home_share(s), share[:, 0], atol=2e-3)
    assert home_share(double([0.0, 0.0])).item() == 1  # nothing speaks against home
    assert home_share(double([math.nan, 1.0], [math.nan, -1.0])).tolist() == pytest.approx([1.0, 0.0])


def posterior(prior: tuple[float, ...], x: Tensor, at: float) -> Tensor:
    """Log posteriors (less a constant) of two classes at -at and +at with deviation 1."""
    return -0.5 * (x.unsqueeze(-1) - torch.tensor([-at, at])) ** 2 + torch.tensor(prior, dtype=torch.float64).log()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_mixture_is_the_posterior_of_the_mixed_prior(share: float) -> None:
    """With exact models, an image of a window with this share of home images has Bayes' own probabilities."""
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    by = replace(BY, mix=0.6, temperature=1.0)
    b = balanced(by, posterior(by.own, x, 1.0), posterior(HALF, x, 1.0))
    home = at_home(by, posterior(by.own, x, 1.0), posterior(HALF, x, 1.0))
    found = mixed(home, everywhere(by, b), likeness(by, b), torch.full((41,), share, dtype=torch.float64))
    prior = tuple(share * p + (1 - share) * g for p, g in zip(by.own, HALF, strict=True))
    assert_close_norm(found, posterior(prior, x, 1.0).softmax(-1), 1e-9)


@pytest.mark.parametrize("own", [0.9, 0.95])
def test_two_gaussian_classes_are_predicted_as_bayes_would(own: float) -> None:
    """Windows of 32, several shares of home images: within 0.5 points of the best, the share within 0.1."""
    draw, prior = torch.Generator().manual_seed(1), (own, 1 - own)

    def images(of: tuple[float, float], n: int) -> tuple[Tensor, Tensor]:
        y = (torch.rand(n, generator=draw) < of[1]).long()
        return torch.randn(n, generator=draw, dtype=torch.float64) + 4.0 * y - 2.0, y

    x, y = images(prior, 250)
    start = Calibration(label_prior([1000 * p for p in prior]), HALF)
    by = calibrated(start, posterior(prior, x, 2.0), posterior(HALF, x, 2.0), y, Drift())
    for share in (1.0, 0.75, 0.5, 0.25, 0.0):
        true = tuple(share * p + (1 - share) * 0.5 for p in prior)
        x, y = images(true, 32 * 500)  # type: ignore[arg-type]
        said = answer(by, posterior(prior, x, 2.0), posterior(HALF, x, 2.0), Drift())
        best = (posterior(true, x, 2.0).argmax(-1) == y).double().mean()
        ours = (said.probabilities.argmax(-1) == y).double().mean()
        assert 100 * float(best - ours) <= 0.5
        assert abs(float(said.verdict.share.mean()) - share) <= 0.1
        if share == 1:
            assert float(said.verdict.drifted.double().mean()) <= 0.01
        if share == 0:
            assert float(said.verdict.drifted.double().mean()) >= 0.9


@pytest.mark.parametrize(("images", "size"), [(7, 3), (2, 8), (6, 3), (1, 1), (0, 4)])
def test_windows_are_groups_and_the_last_one_reaches_back(images: int, size: int) -> None:
    rows, at = windows_of(images, size)
    for i in range(images):
        end = min(images, (i // max(1, min(size, images)) + 1) * size)
        assert rows[at[i]].tolist() == list(range(max(0, end - size), end))


def numbers(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    v, w = (3 * torch.randn(n, 2, generator=draw, dtype=torch.float64) for _ in range(2))
    return v, w


def test_an_answer_is_that_of_its_own_window() -> None:
    v, w = numbers(11)
    options = Drift(window=4, threshold=1.5)
    said = answer(BY, v, w, options)
    rows, at = windows_of(11, 4)
    assert len(set(said.verdict.drifted.tolist())) == 2  # both cases are met
    for i in range(11):
        window = rows[at[i]]
        one = answer(BY, v[window], w[window], options)
        assert_close_norm(said.probabilities[i], one.probabilities[(window == i).nonzero().item()], 1e-12)
        assert float(said.verdict.z[at[i]]) == pytest.approx(float(one.verdict.z[0]))


# streams


def predictor(**options: Any) -> Predictor:
    return Predictor("north", None, None, None, BY, Drift(**{"window": 4, "threshold": 0.5, **options}))  # type: ignore[arg-type]


def joined(parts: list[Answers]) -> Tensor:
    return torch.cat([p.probabilities for p in parts])


def test_a_window_at_once_and_one_by_one_end_alike() -> None:
    v, w = numbers(4)
    at_once = predictor().stream().push_logits(v, w)
    stream = predictor().stream()
    single = [stream.push_logits(v[i : i + 1], w[i : i + 1]) for i in range(4)]
    assert_close_norm(single[-1].probabilities[0], at_once.probabilities[-1], 1e-12)
    assert float(single[-1].z[0]) == pytest.approx(float(at_once.z[-1]))
    first = predictor().stream().push_logits(v[:1], w[:1])
    assert torch.equal(single[0].probabilities, first.probabilities)


def test_groups_of_a_stream_are_those_of_an_evaluation() -> None:
    v, w = numbers(11)
    said: Answer = answer(BY, v, w, Drift(window=4, threshold=0.5))
    assert_close_norm(predictor().stream().push_logits(v, w).probabilities, said.probabilities, 1e-12)


def test_a_saved_stream_goes_on_as_if_it_had_not_stopped() -> None:
    v, w = numbers(9)
    whole, stream = predictor().stream(), predictor().stream()
    expected = [whole.push_logits(v[i : i + 1], w[i : i + 1]) for i in range(9)]
    found = list[Answers]()
    for i in range(9):
        found.append(stream.push_logits(v[i : i + 1], w[i : i + 1]))
        stream = Stream(predictor(), json.loads(json.dumps(stream.state())))
    assert torch.equal(joined(found), joined(expected))
    assert len(stream.state()["likeness"]) == 4


def test_the_state_of_another_stream_is_refused() -> None:
    state = predictor().stream().state()
    with pytest.raises(InputError, match="another window"):
        predictor(window=5).stream(state)
    with pytest.raises(InputError, match="another calibration"):
        Stream(replace(predictor(), calibration=replace(BY, mean=0.4)), state)
    with pytest.raises(InputError, match="damaged"):
        predictor().stream({**state, "likeness": "none"})


# calibrations of few or strange images


def three_classes(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """A personal model that knows two of three classes well, a global one that knows all of them a little."""
    draw = np.random.default_rng(seed)
    y = torch.from_numpy(draw.choice(3, n, p=(0.7, 0.28, 0.02)))
    v, w = (torch.from_numpy(draw.normal(size=(n, 3))) for _ in range(2))
    rows = torch.arange(n)
    v[rows, y] += torch.tensor([4.0, 4.0, 0.0], dtype=torch.float64)[y]
    w[rows, y] += 1.5
    return v + double([1.0, 0.2, -2.0]), w, y


START = Calibration(label_prior([70, 28, 2]), uniform_prior(3))


def strange(v: Tensor, w: Tensor, y: Tensor, what: str) -> tuple[Tensor, Tensor, Tensor]:
    if what == "one class":
        return v, w, torch.zeros_like(y)
    if what == "ties":
        return torch.zeros_like(v), torch.zeros_like(w), y
    if what == "equal images":
        return v[:1].expand_as(v), w[:1].expand_as(w), y
    if what == "NaN in some":
        return v.index_fill(0, torch.tensor([0]), math.nan), w.index_fill(0, torch.tensor([len(w) - 1]), math.inf), y
    if what == "NaN in all":
        return torch.full_like(v, math.nan), w, y
    return v, w, y


@pytest.mark.parametrize(
    "what", ["as they are", "one class", "ties", "equal images", "NaN in some", "NaN in all", "missing class"]
)
@pytest.mark.parametrize("images", [0, 1, 2, 3, 5, 40])
def test_any_validation_data_give_finite_predictions(what: str, images: int) -> None:
    v, w, y = three_classes(max(1, images), 3)
    if what == "missing class":
        y = y.clamp(max=1)
    v, w, y = (t[:images] for t in strange(v, w, y, what))
    by = calibrated(START, v, w, y, Drift())
    assert Calibration.read(json.loads(json.dumps(by.as_dict()))) == by
    v, w, _ = three_classes(50, 4)
    for size in (1, 7, 32):
        said = answer(by, v, w, Drift(), size)
        assert said.probabilities.isfinite().all()
        assert torch.allclose(said.probabilities.sum(-1), torch.ones(50, dtype=torch.float64))
        assert said.verdict.z.isfinite().all()
    if not images or what == "NaN in all":  # the personal model alone
        assert torch.equal(said.probabilities.argmax(-1), v.argmax(-1))
        assert_close_norm(said.probabilities, v.softmax(-1), 1e-12)


@pytest.mark.parametrize("images", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("what", ["as they are", "one class", "ties", "NaN in some"])
def test_few_validation_images_cost_little_at_home(what: str, images: int) -> None:
    """Over 100 clients, no worse than the personal model alone by more than 0.5 points."""
    alone, aware = [], []
    for seed in range(100):
        by = calibrated(START, *strange(*three_classes(images, seed), what), Drift())
        v, w, y = three_classes(64, 1000 + seed)
        alone.append(float((v.argmax(-1) == y).double().mean()))
        said = answer(by, v, w, Drift())
        aware.append(float((said.probabilities.argmax(-1) == y).double().mean()))
    assert 100 * (np.mean(alone) - np.mean(aware)) <= 0.5


def test_a_model_that_is_not_finite_on_an_image_does_not_count_there() -> None:
    v, w = numbers(6)
    broken_v, broken_w = v.clone(), w.clone()
    broken_v[0, 1], broken_w[1, 0] = math.nan, math.inf
    said, whole = answer(BY, broken_v, broken_w, Drift(window=1)), answer(BY, v, w, Drift(window=1))
    assert said.probabilities.isfinite().all()
    assert torch.equal(said.probabilities[2:], whole.probabilities[2:])
    assert_close_norm(balanced(BY, broken_v, broken_w)[0], (w[0] / 2).log_softmax(-1), 1e-12)
    assert_close_norm(balanced(BY, broken_v, broken_w)[1], (v[1] - BY.ratio).log_softmax(-1), 1e-12)
    broken_w[0, 0] = math.nan  # both: there is no prediction, and the other images of the window keep theirs
    both = answer(BY, broken_v, broken_w, Drift(window=6))
    assert both.probabilities[0].isnan().all()
    assert both.probabilities[2:].isfinite().all()


def test_the_fit_is_the_best_point_of_the_grid() -> None:
    v, w, y = three_classes(30, 5)
    by = calibrated(START, v, w, y, Drift())
    ratio = START.ratio

    def loss(mix: float, temperature: float) -> float:
        scores = (1 - mix) * (v - ratio) + mix * w / temperature + ratio
        likely = float(-scores.log_softmax(-1)[torch.arange(30), y].sum())
        return likely + 0.3 / 2 * (((mix - 0.6) / 0.25) ** 2 + (math.log(temperature) / 0.5) ** 2)

    every = [loss(float(a), float(t)) for a in MIXES for t in TEMPERATURES]
    assert loss(by.mix, by.temperature) == pytest.approx(min(every), abs=1e-6)
    b = balanced(by, v, w)
    s = likeness(by, b)
    assert by.mean == pytest.approx(float(s.mean()), abs=1e-8)
    guess = (math.log(3 * 71 / 103) - math.log(3 * 3 / 103)) / 4
    assert by.deviation == pytest.approx(math.sqrt((float(((s - s.mean()) ** 2).sum()) + guess**2) / 30), abs=1e-8)


# priors, options, files


def test_priors_by_hand() -> None:
    assert label_prior([3, 0]) == pytest.approx((0.8, 0.2))
    assert label_prior([3, 0], samples=3, multilabel=True) == pytest.approx((0.8, 0.2))
    assert uniform_prior(4) == (0.25,) * 4
    assert uniform_prior(2, multilabel=True) == (0.5, 0.5)
    logits = double([0.0, 0.0], [math.log(3), 0.0], [math.nan, 0.0])
    assert mean_prior(logits) == pytest.approx((0.625, 0.375))
    assert mean_prior(logits[2:]) == (0.5, 0.5)
    assert min(mean_prior(double([-900.0, 900.0]))) > 0


def test_options_are_checked() -> None:
    for bad in ({"window": 0}, {"threshold": 0.0}, {"mix": 1.5}, {"strength": 0.0}, {"prior": "secret"}):
        with pytest.raises(InputError, match=r"Drift\."):
            Drift(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "bad",
    [
        {"own": [0.5]},
        {"own": [0.0, 1.0]},
        {"mean": None},
        {"temperature": 0.0},
        {"images": -1},
        {"deviation": "wide"},
        {"more": 1},
    ],
)
def test_a_calibration_that_was_not_written_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Calibration.read({**BY.as_dict(), **bad})


def test_labels_have_a_bernoulli_each() -> None:
    """Two labels: s is the sum over labels, and home predictions are shifted by the log odds of P less those of g."""
    by = Calibration((0.8, 0.1), HALF, mix=0.0, mean=0.0, deviation=1.0, images=9, multilabel=True)
    v, w = double([1.0, -2.0]), double([0.0, 0.0])
    b = balanced(by, v, w)
    assert b[0].tolist() == pytest.approx([1 - math.log(4), -2 + math.log(9)])
    p = b.sigmoid()[0].tolist()
    expected = math.log(p[0] * 1.6 + (1 - p[0]) * 0.4) + math.log(p[1] * 0.2 + (1 - p[1]) * 1.8)
    assert likeness(by, b).tolist() == pytest.approx([expected])
    home = answer(by, v, w, Drift(threshold=1e9, window=1)).probabilities
    assert_close_norm(home, v.sigmoid(), 1e-12)
    abroad = answer(replace(by, mean=1e3), v, w, Drift(window=1))
    assert abroad.verdict.share.item() == pytest.approx(0.0 if expected < 0 else 1.0, abs=1e-9)
