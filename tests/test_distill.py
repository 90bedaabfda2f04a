"""Distillation: what the teacher is, and what the student learns."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_tensors
from lanes.problems import noisy
from small import ONE, adam_by_hand, double, lanes_of, pixel_model, weights_of
from torch import Tensor

from perada import adapt
from perada.errors import InputError
from perada.lanes import LaneModel, State, gather, mean
from perada.models.resnet import resnet
from perada.server.distill import Distill, chunks_in, chunks_of, distill, kl, teacher_logits
from perada.server.guard import Server

# The teacher and the loss.


def test_the_teacher_is_the_mean_of_logits_not_of_probabilities() -> None:
    """Two sure teachers that agree on a second choice: the mean of their logits takes it, (5, 5, 9); the mean
    of their probabilities, about (0.37, 0.37, 0.27), does not."""
    teachers = lanes_of([10.0, 0.0, 9.0], [0.0, 10.0, 9.0])
    (found,) = teacher_logits(pixel_model(0.0, 0.0, 0.0), teachers, [ONE], "public")
    assert torch.equal(found, double([5.0, 5.0, 9.0]).expand(4, 3))
    probabilities = double([10.0, 0.0, 9.0], [0.0, 10.0, 9.0]).softmax(-1).mean(0)
    assert int(found[0].argmax()) == 2
    assert int(probabilities.argmax()) != 2


def test_a_student_learns_the_softmax_of_the_mean_logits() -> None:
    options = Distill(steps=400, lr=0.1, guard="none")
    teachers = lanes_of([10.0, 0.0, 9.0], [0.0, 10.0, 9.0])
    found, trace = distill(pixel_model(0.0, 0.0, 0.0), lanes_of([0.0, 0.0, 0.0]), teachers, [ONE], options, False, 0)
    wanted = double([5.0, 5.0, 9.0]).softmax(-1)
    assert torch.allclose(found.params["fc.weight"][0, :, 0].softmax(-1), wanted[0], atol=1e-3)
    assert trace[-1] < 1e-5 < trace[0]


def test_kl_of_a_softmax_by_hand() -> None:
    """Teacher (¾, ¼), student (½, ½): ¾ ln(¾/½) + ¼ ln(¼/½) = 0.130812; the mean with an equal pair is half."""
    teacher, student = double([math.log(3.0), 0.0], [1.0, 1.0]), double([0.0, 0.0], [7.0, 7.0])
    assert float(kl(teacher[:1], student[:1], 1.0, False).mean()) == pytest.approx(0.13081203594113694, rel=1e-12)
    assert float(kl(teacher, student, 1.0, False).mean()) == pytest.approx(0.13081203594113694 / 2, rel=1e-12)


def test_kl_is_from_the_teacher_to_the_student() -> None:
    """The other direction is ½ ln(½/¾) + ½ ln(½/¼) = 0.143841."""
    teacher, student = double([math.log(3.0), 0.0]), double([0.0, 0.0])
    assert float(kl(student, teacher, 1.0, False).mean()) == pytest.approx(0.14384103622589042, rel=1e-12)


def test_kl_of_labels_is_the_sum_of_bernoulli_kls_by_hand() -> None:
    """Labels 1 and 2: teacher ¾ and ½, student ½ and ½: 0.130812 + 0. A softmax over labels would give another."""
    teacher, student = double([math.log(3.0), 0.0]), double([0.0, 0.0])
    assert float(kl(teacher, student, 1.0, True).mean()) == pytest.approx(0.13081203594113694, rel=1e-12)
    both = double([math.log(3.0), math.log(3.0)])  # for a softmax these two teachers would say nothing at all
    assert float(kl(both, student, 1.0, True).mean()) == pytest.approx(2 * 0.13081203594113694, rel=1e-12)
    assert float(kl(both, student, 1.0, False).mean()) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("multilabel", [False, True])
def test_a_temperature_softens_both_sides_and_the_loss_is_scaled_by_its_square(multilabel: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    t, s = (torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    assert float(kl(t, s, 2.5, multilabel).mean()) == pytest.approx(
        6.25 * float(kl(t / 2.5, s / 2.5, 1.0, multilabel).mean())
    )


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_a_perfect_student_has_no_loss_and_no_gradient(multilabel: bool, temperature: float) -> None:
    teacher = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    student = teacher.clone().requires_grad_()
    loss = kl(teacher, student, temperature, multilabel).mean()
    (gradient,) = torch.autograd.grad(loss, student)
    assert abs(loss.item()) < 1e-15
    assert float(gradient.abs().max()) < 1e-15


@pytest.mark.parametrize("multilabel", [False, True])
def test_extreme_logits_stay_finite(multilabel: bool) -> None:
    teacher = double([1e4, -1e4])
    student = double([-1e4, 1e4]).requires_grad_()
    loss = kl(teacher, student, 1.0, multilabel).mean()
    assert math.isfinite(loss.item())
    assert torch.autograd.grad(loss, student)[0].isfinite().all()


# The steps.


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_the_steps_are_adams_with_the_rate_of_the_schedule(schedule: Any) -> None:
    """A cosine from η_g towards 0: in 6 steps the factors are 1, 0.933, 0.75, 0.5, 0.25, 0.067."""
    options = Distill(steps=6, lr=0.05, schedule=schedule, guard="clients", candidates=(1, 2, 3, 4, 5))
    factor = [1.0, 0.9330127018922194, 0.75, 0.5, 0.25, 0.0669872981077807]
    rates = [0.05 * f if schedule == "cosine" else 0.05 for f in factor]
    found, _ = distill(
        pixel_model(0.0, 0.0), lanes_of([0.3, -0.2]), lanes_of([2.0, -1.0], [1.0, 1.0]), [ONE], options, False, 0
    )
    by_hand = [[0.3, -0.2], *adam_by_hand([0.3, -0.2], [1.5, 0.0], rates)]  # the average comes first
    assert np.allclose(weights_of(found), by_hand, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("pull", "decay"), [(0.7, 0.0), (0.0, 0.3), (0.7, 0.3)])
def test_a_pull_and_weight_decay_are_in_the_loss(pull: float, decay: float) -> None:
    """Through a candidate: the pull's centre is the average, not the student at the last candidate."""
    options = Distill(steps=6, lr=0.05, schedule="constant", candidates=(2,), pull=pull, weight_decay=decay)
    start, teachers = lanes_of([0.3, -0.2]), lanes_of([2.0, -1.0], [1.0, 1.0])
    found, _ = distill(pixel_model(0.0, 0.0), start, teachers, [ONE], options, False, 0)
    by_hand = adam_by_hand([0.3, -0.2], [1.5, 0.0], [0.05] * 6, pull, decay)
    assert np.allclose(weights_of(found), [[0.3, -0.2], by_hand[1], by_hand[5]], rtol=0, atol=1e-12)
    assert not np.allclose(by_hand[5], adam_by_hand([0.3, -0.2], [1.5, 0.0], [0.05] * 6)[5], atol=1e-3)


def test_a_strong_pull_holds_the_student_at_the_average() -> None:
    """The loss's minimum is where KL's gradient is pull · distance: at most 1/pull away in each weight."""
    options = Distill(steps=2000, lr=0.01, guard="none", pull=1e3)
    found, _ = distill(pixel_model(0.0, 0.0), lanes_of([0.3, -0.2]), lanes_of([9.0, -9.0]), [ONE], options, False, 0)
    assert np.allclose(weights_of(found), [[0.3, -0.2]], atol=1.1e-3)


@pytest.mark.parametrize("key", ["pull", "weight_decay"])
def test_a_negative_pull_or_decay_is_refused(key: str) -> None:
    with pytest.raises(InputError, match=f"Distill.{key} must be at least 0, not -1"):
        Distill(**{key: -1.0})  # type: ignore[arg-type]


def test_the_trace_is_the_loss_before_each_step() -> None:
    options = Distill(steps=3, lr=0.05, guard="none")
    start, teachers = lanes_of([0.3, -0.2]), lanes_of([2.0, -1.0])
    _, trace = distill(pixel_model(0.0, 0.0), start, teachers, [ONE], options, False, 0)
    assert len(trace) == 3
    assert float(trace[0]) == pytest.approx(float(kl(double([2.0, -1.0]), double([0.3, -0.2]), 1.0, False).mean()))
    assert trace[2] < trace[1] < trace[0]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (Distill(steps=10, candidates=(5, 2, 5, 3), guard="clients"), (2, 3, 5, 10)),
        (Distill(steps=10, candidates=(10, 20), guard="server"), (10,)),
        (Distill(steps=10, candidates=(), guard="clients"), (10,)),
        (Distill(steps=10, candidates=(5,), guard="none"), (10,)),
        (Distill(), (20, 60, 150, 500)),
    ],
)
def test_candidates_are_the_wanted_steps_and_the_last(options: Distill, wanted: tuple[int, ...]) -> None:
    assert options.snapshots() == wanted


def test_a_candidate_is_the_student_after_so_many_steps() -> None:
    """The second of three candidates equals a constant-rate run that ends there."""
    model, start, teachers = pixel_model(0.0, 0.0), lanes_of([0.3, -0.2]), lanes_of([2.0, -1.0])
    many = Distill(steps=9, lr=0.05, schedule="constant", candidates=(2, 5))
    found, _ = distill(model, start, teachers, [ONE], many, False, 0)
    assert found.lanes == 4
    short, _ = distill(
        model, start, teachers, [ONE], Distill(steps=5, lr=0.05, schedule="constant", guard="none"), False, 0
    )
    assert weights_of(found)[2] == weights_of(short)[0]


def test_public_data_are_shuffled_once_and_cut_into_equal_chunks() -> None:
    chunks = chunks_of(100, Distill(batch=32), seed=0)
    assert [len(c) for c in chunks] == [32, 32, 32]
    index = torch.cat(chunks).tolist()
    assert len(set(index)) == 96
    assert index != sorted(index), "files may be sorted by class"
    assert [c.tolist() for c in chunks] == [c.tolist() for c in chunks_of(100, Distill(batch=32), seed=0)]
    assert [c.tolist() for c in chunks] != [c.tolist() for c in chunks_of(100, Distill(batch=32), seed=1)]
    assert [len(c) for c in chunks_of(100, Distill(batch=32, size=40), seed=0)] == [32]
    assert [len(c) for c in chunks_of(100, Distill(batch=4096), seed=0)] == [100]


# A real network: batch norm, dropout, inert biases.


@pytest.fixture(scope="module")
def model() -> LaneModel:
    return adapt(resnet("resnet8", 5)).to("cpu", torch.float64)


@pytest.fixture(scope="module")
def chunks() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [2 + torch.randn(6, 3, 8, 8, generator=draw, dtype=torch.float64) for _ in range(2)]


@pytest.fixture
def teachers(model: LaneModel) -> State:
    return noisy(model.initial(3))


def run(model: LaneModel, teachers: State, chunks: list[Tensor], key: int = 0, **set: Any) -> State:
    options = Distill(**{"steps": 3, "lr": 0.01, "guard": "none", **set})
    return distill(model, mean(teachers), teachers, chunks, options, False, key)[0]


def copied(state: State) -> State:
    return state.map(torch.clone)


def test_rounds_of_few_steps_go_through_all_chunks_in_time() -> None:
    assert [chunks_in(r, 2, 5) for r in range(4)] == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert [chunks_in(r, 5, 5) for r in (0, 3)] == [[0, 1, 2, 3, 4]] * 2
    assert chunks_in(3, 7, 5) == [0, 1, 2, 3, 4]  # a round of enough steps begins with the first


def test_teachers_are_asked_only_for_the_chunks_of_their_round(
    model: LaneModel, teachers: State, chunks: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[list[int]]()

    def watched(*args: Any) -> Tensor:
        asked.append(args[5])
        return teacher_logits(*args)

    monkeypatch.setattr("perada.server.distill.teacher_logits", watched)
    options, start = Distill(steps=1, guard="none"), mean(teachers)
    first, second, third = (
        distill(model, start, teachers, chunks, options, False, 0, round=r)[0].params for r in range(3)
    )
    assert asked == [[0], [1], [0]]
    assert not all(torch.equal(first[n], second[n]) for n in first)
    other = [chunks[0], chunks[1] + 1]  # which the third does not see
    again = distill(model, start, teachers, other, options, False, 0, round=2)[0].params
    assert all(torch.equal(third[n], again[n]) for n in third)


def test_public_statistics_normalise_the_teachers_chunk_by_chunk(
    model: LaneModel, teachers: State, chunks: list[Tensor]
) -> None:
    """With the chunk's own statistics an affine change of all images vanishes in the first norm of every
    channel; the running ones are another network's idea of the data."""
    public, running = (teacher_logits(model, teachers, chunks, norm) for norm in ("public", "running"))
    assert all(float((a - b).norm()) > 1e-2 for a, b in zip(public, running, strict=True))
    by_hand = [model(teachers, x.repeat(3, 1, 1, 1), norm="batch").mean(0) for x in chunks]
    assert all(torch.equal(a, b) for a, b in zip(public, by_hand, strict=True))
    other = State(teachers.params, {n: b + 5 for n, b in teachers.buffers.items()})
    again, moved = (teacher_logits(model, other, chunks, norm) for norm in ("public", "running"))
    assert all(torch.equal(a, b) for a, b in zip(public, again, strict=True)), "running statistics must not matter"
    assert not torch.equal(moved[0], running[0])


@pytest.mark.parametrize("norm", ["public", "running"])
@pytest.mark.parametrize("student_norm", ["batch", "frozen"])
def test_teachers_and_the_average_are_never_changed(
    model: LaneModel, teachers: State, chunks: list[Tensor], norm: str, student_norm: str
) -> None:
    before, start = copied(teachers), mean(teachers)
    start_before = copied(start)
    options = Distill(steps=3, lr=0.01, guard="none", teacher_norm=norm, student_norm=student_norm)  # type: ignore[arg-type]
    distill(model, start, teachers, chunks, options, False, 0)
    for a, b in ((teachers, before), (start, start_before)):
        assert_same_tensors(a.params, b.params)
        assert_same_tensors(a.buffers, b.buffers)
        assert not any(t.requires_grad for t in a.tensors())


def test_teachers_are_asked_once_per_chunk_and_their_logits_kept(
    model: LaneModel, teachers: State, chunks: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven steps over two chunks: two passes of three teachers, seven of the student, not seven of both."""
    calls: list[tuple[int, bool]] = []
    real = LaneModel.__call__

    def counted(self: LaneModel, state: State, *args: Any, **kwargs: Any) -> Tensor:
        calls.append((state.lanes, kwargs.get("dropout") is not None))
        return real(self, state, *args, **kwargs)

    monkeypatch.setattr(LaneModel, "__call__", counted)
    run(model, teachers, chunks, steps=7)
    assert calls == [(3, False)] * 2 + [(1, True)] * 7, "teachers have no dropout, the student has"


def test_kept_statistics_are_the_averages_or_the_students(
    model: LaneModel, teachers: State, chunks: list[Tensor]
) -> None:
    average = mean(teachers)
    kept = run(model, teachers, chunks, keep_stats="average")
    own = run(model, teachers, chunks, keep_stats="student")
    assert_same_tensors(kept.params, own.params)
    assert_same_tensors(kept.buffers, average.buffers)
    assert not torch.equal(own.buffers["bn1.running_mean"], average.buffers["bn1.running_mean"])


def test_a_frozen_student_normalises_with_the_average_and_keeps_it(
    model: LaneModel, teachers: State, chunks: list[Tensor]
) -> None:
    frozen = run(model, teachers, chunks, student_norm="frozen", keep_stats="student")
    assert_same_tensors(frozen.buffers, mean(teachers).buffers)
    batch = run(model, teachers, chunks, student_norm="batch")
    assert not torch.equal(frozen.params["fc.weight"], batch.params["fc.weight"])


def test_the_norm_of_the_teachers_changes_what_is_learnt(
    model: LaneModel, teachers: State, chunks: list[Tensor]
) -> None:
    public, running = (run(model, teachers, chunks, teacher_norm=n) for n in ("public", "running"))
    assert float((public.params["fc.weight"] - running.params["fc.weight"]).norm()) > 1e-4


def test_adam_does_not_move_inert_biases(model: LaneModel, teachers: State, chunks: list[Tensor]) -> None:
    """Their gradient is zero up to rounding, which Adam would divide by itself and follow."""
    found, average = run(model, teachers, chunks, steps=5), mean(teachers)
    assert model.inert
    for name in found.params:
        assert torch.equal(found.params[name], average.params[name]) == (name in model.inert), name


def test_the_students_dropout_follows_its_key(model: LaneModel, teachers: State, chunks: list[Tensor]) -> None:
    a, b, c = (run(model, teachers, chunks, key=key) for key in (0, 0, 1))
    assert_same_tensors(a.params, b.params)
    assert not torch.equal(a.params["fc.weight"], c.params["fc.weight"])


def test_a_student_of_no_steps_is_judged_where_students_keep_statistics_of_the_public_images(
    model: LaneModel, teachers: State, chunks: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the plain average: its weights, and the statistics that steps of no length would leave."""
    monkeypatch.setattr("perada.server.distill.STATISTICS", 4)
    start, given = mean(teachers), {"steps": 6, "candidates": [3, 4], "guard": "clients", "keep_stats": "student"}
    options, tiny = Distill(lr=0.01, **given), Distill(lr=1e-30, **given)  # type: ignore[arg-type]
    found, _ = distill(model, start, teachers, chunks, options, False, 0)
    still, _ = distill(model, start, teachers, chunks, tiny, False, 0)
    assert options.judged() == (0, 0, 3, 4, 6)
    assert found.lanes == 5
    average, none = gather(found, [0]), gather(found, [1])
    for one in (average, none):
        assert_same_tensors(one.params, start.params)
    assert_same_tensors(average.buffers, start.buffers)
    assert_same_tensors(none.buffers, gather(still, [3]).buffers)  # four steps that led nowhere
    assert not torch.equal(none.buffers["bn1.running_mean"], start.buffers["bn1.running_mean"])
    alone, _ = distill(model, start, teachers, chunks, dataclasses.replace(options, guard="none"), False, 0)
    assert_same_tensors(gather(found, [4]).params, alone.params)  # the student is what it was
    assert_same_tensors(gather(found, [4]).buffers, alone.buffers)


@pytest.mark.parametrize("other", [{"keep_stats": "average"}, {"keep_stats": "student", "student_norm": "frozen"}])
def test_where_all_have_the_average_s_statistics_there_is_no_student_of_no_steps(
    model: LaneModel, teachers: State, chunks: list[Tensor], other: dict[str, Any]
) -> None:
    start, options = mean(teachers), Distill(steps=2, lr=0.01, guard="clients", **other)
    found, _ = distill(model, start, teachers, chunks, options, False, 0)
    assert options.judged() == (0, 2)
    assert found.lanes == 2
    for lane in (0, 1):
        assert_same_tensors(gather(found, [lane]).buffers, start.buffers)


@pytest.mark.parametrize(
    ("losses", "steps", "weights", "statistics"),
    [([0.1, 0.2, 0.3], 0, True, True), ([0.2, 0.1, 0.3], 0, True, False), ([0.2, 0.3, 0.1], 2, False, False)],
)
def test_a_guard_keeps_what_it_judged(
    model: LaneModel,
    teachers: State,
    chunks: list[Tensor],
    losses: list[float],
    steps: int,
    weights: bool,
    statistics: bool,
) -> None:
    """The average with its own statistics, or with those of public images, which is no student accepted either; or the
    student. `weights` and `statistics`: whether they are the average's."""
    options = Distill(steps=2, lr=0.01, guard="clients", keep_stats="student", candidates=())
    server, start = Server(model, chunks, options, False, 0, 0), mean(teachers)
    state = server.distill(start, teachers)
    assert server.candidates is not None
    best, log = server.candidates.choose(double(*([x] for x in losses)))
    found = server.candidates.pick(state, best)
    assert torch.equal(found.params["fc.weight"], start.params["fc.weight"]) == weights
    assert torch.equal(found.buffers["bn1.running_mean"], start.buffers["bn1.running_mean"]) == statistics
    assert log["guard_chose"] == steps
    assert log["guard_index"] == losses.index(min(losses))


def test_distilling_brings_the_student_nearer(chunks: list[Tensor], teachers: State, model: LaneModel) -> None:
    options = Distill(steps=40, lr=0.01, guard="none")
    _, trace = distill(model, mean(teachers), teachers, chunks, options, False, 0)
    assert trace[-4:].mean() < 0.5 * trace[:4].mean()


def test_multilabel_students_learn_each_label() -> None:
    """Teachers (2, 2) and (2, −2): labels at σ(2) and σ(0). A softmax would only see the difference."""
    options = Distill(steps=400, lr=0.1, guard="none")
    found, _ = distill(
        pixel_model(0.0, 0.0), lanes_of([0.0, 1.0]), lanes_of([2.0, 2.0], [2.0, -2.0]), [ONE], options, True, 0
    )
    assert weights_of(found)[0] == pytest.approx([2.0, 0.0], abs=1e-2)
