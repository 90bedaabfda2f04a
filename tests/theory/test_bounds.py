"""`perada.theory.bounds` on runs: the bounds hold on random toys, and every kind of run is measured or refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said, strict, train
from small import SMALL
from torch import Tensor, nn

import perada
from perada.cli import main as cli
from perada.errors import InputError
from perada.theory import Bounds, bounds
from perada.theory.generalisation import Generalisation
from perada.theory.probe import Probe
from perada.theory.terms import HELD_OUT, MEASURED, STATED

SITES, CLASSES = ("north", "south", "west"), 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6 * 16, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.fc(torch.relu(self.norm(self.conv(images))).flatten(1))
        return out


def toy(path: Path, seed: int, easy: bool = False) -> tuple[perada.Run, Any]:
    """A run of a tiny network on random blobs, its public images, and a function that draws fresh images per site."""
    draw = np.random.default_rng(seed)
    patterns = draw.normal(size=(CLASSES, 4, 4))
    blur, skew = float(draw.uniform(0.3, 1.5)), float(draw.choice([0.3, 1.0, 100.0]))
    blur, skew = (0.1, 1000.0) if easy else (blur, skew)
    shares = draw.dirichlet([skew] * CLASSES, len(SITES))

    def images(labels: np.ndarray) -> np.ndarray:
        noise = blur * draw.normal(size=(len(labels), 4, 4))
        return (128 + 40 * (patterns[labels] + noise)).clip(0, 255).astype(np.uint8)

    def sites(n: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        labels = [draw.choice(CLASSES, n, p=p) for p in shares]
        return {name: (images(y), y) for name, y in zip(SITES, labels, strict=True)}

    data = perada.Federation.from_arrays(sites(40), val=sites(10), test=sites(120), classes=["a", "b", "c"])
    torch.manual_seed(seed)
    public = torch.from_numpy(images(draw.choice(CLASSES, 40))[:, None])
    exp = perada.Experiment(
        Net(),
        data,
        perada.methods.PerAda(lam=float(draw.choice([0.1, 1.0]))),
        head="fc",
        adapter=perada.adapters.Residual(),
        public=public,
        train=perada.Train(rounds=20 if easy else 2, epochs=1, batch=8, lr=float(draw.choice([0.01, 0.1]))),
        distill=perada.Distill(steps=3, batch=20, guard="none"),
        seed=seed,
    )
    run = exp.run(path)
    return run, (public, sites)


@pytest.mark.parametrize("seed", range(20))
def test_the_bounds_hold_on_a_random_toy(tmp_path: Path, seed: int) -> None:
    """They hold for the error on the run's test images, and for the error on many fresh ones."""
    run, (public, fresh) = toy(tmp_path / "run", seed)
    found = bounds(run, public=public)
    assert found.theorem1 is not None
    for bound in (found.theorem1, found.theorem2):
        for total in bound.totals:
            assert total.value is not None
            assert not total.holds or total.value >= bound.error
            assert total.vacuous == (total.value >= 1)
    assert found.theorem2.per_client is not None
    for name, row in found.theorem2.per_client.items():
        assert row["bound"] is not None
        assert row["error"] is not None
        assert row["bound"] >= row["error"], name
    pairs = fresh(500).values()
    images = torch.from_numpy(np.concatenate([x for x, _ in pairs])[:, None])
    labels = torch.from_numpy(np.concatenate([y for _, y in pairs]))
    probe = Probe(run, 0, public)
    everybody = float((probe.logits(probe.common, images)[0].argmax(-1) != labels).double().mean())
    personal = float((probe.logits(probe.personal, images).argmax(-1) != labels).double().mean())
    for bound, wrong in ((found.theorem1, everybody), (found.theorem2, personal)):
        held_out = bound.total(HELD_OUT).value
        assert held_out is not None
        assert held_out >= wrong


def test_a_good_model_at_like_sites_has_a_bound_that_says_something(tmp_path: Path) -> None:
    """Without complexity terms Theorem 2 is not vacuous there; as it is stated, it always is."""
    of = bounds(toy(tmp_path / "run", 1, easy=True)[0]).theorem2
    assert not of.total(HELD_OUT).vacuous, of.total(HELD_OUT).value
    assert of.total(STATED).vacuous


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with enough test images per client."""
    out = tmp_path_factory.mktemp("bounds") / "run"
    assert train(out, data__test=0.2, data__server_val=0.5) == 0
    return out


@pytest.fixture(scope="module")
def measured(digits: Path) -> Bounds:
    return bounds(perada.load(digits, device="cpu"))


def test_the_terms_are_what_the_models_predict(digits: Path, measured: Bounds) -> None:
    """Recomputed with the plain module of a client, without lanes."""
    run = perada.load(digits, device="cpu")
    test, data = run.federation.test, run.federation
    images, labels = run.normalise(data.take(test)), data.labels(test)
    common = run.experiment.model.plain(run.experiment.global_model).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        g = common(images).softmax(-1)
        p = [run.model(name)(images).softmax(-1) for name in run.clients]
    assert measured.theorem2.term("1−g_y").value == pytest.approx(
        float(1 - g.gather(1, labels[:, None]).mean()), abs=1e-5
    )
    distances = [float((one - g).abs().sum(1).clamp(max=1).mean()) for one in p]
    assert measured.theorem2.term("min{1,‖p−g‖₁}").value == pytest.approx(float(np.mean(distances)), abs=1e-5)
    wrong = [float((one.argmax(1) != labels).double().mean()) for one in p]
    assert measured.theorem2.error == pytest.approx(float(np.mean(wrong)), abs=1e-9)
    scores = run.summary["global_test"]["mean"]
    assert measured.theorem2.error == pytest.approx(1 - scores / 100, abs=1e-6)
    assert measured.theorem1 is not None
    assert measured.theorem1.error == pytest.approx(1 - run.summary["global_model"]["global_test"] / 100, abs=1e-6)


def test_the_local_models_are_those_of_a_further_round(digits: Path) -> None:
    """θ_m of round T + 1, where every client trains: bit for bit what the method would upload."""
    run = perada.load(digits, device="cpu")
    probe = Probe(run, 0)
    exp = perada.config.build(run.config, federation=run.federation)
    saved, _ = run.folder.load()
    assert saved is not None
    exp.restore(saved)
    uploads, _ = exp.method.client_update(exp.trainer(range(probe.clients)), exp.now.broadcast, exp.now.kept)
    for name, tensor in uploads.params.items():
        assert torch.allclose(tensor, probe.local.params[name], atol=1e-6), name
    assert probe.taken_steps == exp.trainer(range(probe.clients)).steps


def test_a_budget_takes_fewer_images_and_says_so(digits: Path, measured: Bounds) -> None:
    run = perada.load(digits, device="cpu")
    few, every = Probe(run, 40), Probe(run, 0)
    assert len(few.target) == 160 < len(every.target)  # 8×8 images count a sixteenth, and four clients share them
    assert set(few.target) <= set(every.target)
    assert few.taken_steps[0] < every.taken_steps[0]
    found = bounds(run, images=40)
    assert found.theorem1 is not None
    assert measured.theorem1 is not None
    assert f"{max(few.taken_steps)} of {max(few.planned_steps)} local" in found.theorem1.term("ERR").estimator
    assert found.theorem2.total(HELD_OUT).value > 0  # type: ignore[operator]
    again = bounds(perada.load(digits, device="cpu"), images=40)
    assert again.as_dict() == found.as_dict(), "the same run gives the same numbers"


def test_the_clients_label_mixtures_bound_their_divergence(digits: Path, measured: Bounds) -> None:
    assert measured.theorem1 is not None
    term = measured.theorem1.term("d̂")
    assert term.low is not None
    assert term.value is not None
    assert term.high is not None
    assert 0 <= term.low <= term.value <= term.high <= 2
    tv = measured.theorem1.term("TV")
    assert tv.high == 1.0
    of = Generalisation(Probe(perada.load(digits, device="cpu"), 0), 0.05)
    assert sum(len(f) for f in of.features) == sum(len(c.train) for c in of.data.clients)


def test_public_images_of_the_same_source_are_not_far(tmp_path: Path) -> None:
    """With the clients' own validation images as public data TV is small, and its upper estimate is below 1."""
    out = tmp_path / "run"
    assert train(out, distill__data="validation", data__val=0.2, data__test=0.2, data__server_val=0.2) == 0
    found = bounds(perada.load(out, device="cpu"))
    assert found.theorem1 is not None
    tv = found.theorem1.term("TV")
    assert tv.value is not None
    assert tv.high is not None
    assert tv.value <= tv.high < 1
    assert not found.sentences[0].warns


def test_phi_and_the_student(measured: Bounds) -> None:
    of = measured.distillation
    assert of is not None
    assert of["steps"] == of["planned_steps"] == 4
    assert of["images"] == 32
    for name in ("global", "average", "student"):
        assert 0 < float(of[f"{name}_probabilities"] or 0) < 2
    assert measured.theorem1 is not None
    assert measured.theorem1.term("Φ").value == of["global_probabilities"]


def test_the_convergence_of_a_small_run(digits: Path, measured: Bounds) -> None:
    of = measured.convergence
    assert of.rounds == (0, 1, 2)
    c = of.constants
    assert (c.T, c.M, c.R, c.lam) == (2, 4, 4, 1.0)
    assert all(v > 0 for v in (c.L, c.L_R, c.sigma2, c.sigma_R2, c.gamma, c.G, c.G_R, c.G_P))
    run = perada.load(digits, device="cpu")
    exp = run.experiment
    away = [float(sum(((exp.now.kept.params[n][m] - exp.now.broadcast.params[n][0]) ** 2).sum()
                      for n in exp.now.kept.params if n not in exp.model.inert)) ** 0.5 for m in range(4)]  # fmt: skip
    assert pytest.approx(max(away), rel=1e-5) == c.G_P, "∇_w P_m = λ (w − v_m)"
    assert len(of.personal_norms) == 4
    assert any("2 of 4" in note for note in of.notes)


def test_the_command_prints_one_document_or_tables(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = strict(said(capsys, "bounds", str(digits), "--json", "--device", "cpu", "--images", "100"))
    assert found.keys() >= {"theorem1", "theorem2", "distillation", "convergence", "sentences", "delta"}
    assert len(found["sentences"]) == 3
    assert [t["name"] for t in found["theorem2"]["totals"]] == [MEASURED, STATED, HELD_OUT]
    text = said(capsys, "bounds", str(digits), "--device", "cpu", "--images", "100")
    assert "vacuous" in text
    for sentence in found["sentences"]:
        assert sentence["text"].replace("Distill.steps", "distill.steps").replace("Train.lr", "train.lr") in text


@pytest.mark.parametrize(
    ("method", "says"),
    [("standalone", "no global model"), ("fedrep", "no global model")],
)
def test_a_method_without_a_global_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, says: str
) -> None:
    assert train(tmp_path / "run", "--method", method, train__rounds=1) == 0
    capsys.readouterr()
    assert cli.main(["bounds", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("method", ["fedavg", "ditto", "perada-no-kd"])
def test_other_methods_are_measured_as_far_as_they_go(tmp_path: Path, method: str) -> None:
    assert train(tmp_path / "run", "--method", method, data__test=0.2, data__server_val=0.5) == 0
    found = bounds(perada.load(tmp_path / "run", device="cpu"))
    json.dumps(found.as_dict(), allow_nan=False)
    assert found.theorem2.total(HELD_OUT).value >= found.theorem2.error  # type: ignore[operator]
    assert found.convergence.constants.R == 0
    if method == "fedavg":
        assert found.theorem2.term("min{1,‖p−g‖₁}").value == 0, "all clients predict with g"
        assert found.convergence.theorem4 == {}
    else:
        assert found.convergence.theorem4


def test_bad_input_is_one_line(digits: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in ((["--delta", "1.5"], "delta"), (["--images", "-1"], "images"), (["--delta", "nan"], "delta")):
        capsys.readouterr()
        assert cli.main(["bounds", str(digits), *words]) == 2
        err = capsys.readouterr().err
        assert says in err
        assert err.count("\n") == 1


def test_data_with_several_labels_are_refused(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    pair = draw.integers(0, 255, (60, 4, 4), dtype=np.uint8), draw.integers(0, 2, (60, 3))
    data = perada.Federation.from_arrays({"a": pair, "b": pair})
    exp = perada.Experiment(Net(), data, perada.methods.FedAvg(), head="fc", train=perada.Train(rounds=1, epochs=1))
    with pytest.raises(InputError, match="several labels"):
        bounds(exp.run(tmp_path / "run"))


def test_a_callback_sees_every_round(tmp_path: Path) -> None:
    """It measures what `bounds` measures at a state, and changes nothing."""
    norms = perada.theory.GradientNorms()
    whole = {**SMALL, "train.rounds": 3, "run.seed": 4}
    run = perada.train("digits", set=whole, out=tmp_path / "a", device="cpu", callbacks=[norms])
    other = perada.train("digits", set=whole, out=tmp_path / "b", device="cpu")
    assert run.summary["local_test"] == other.summary["local_test"]
    assert norms.rounds == [0, 1, 2, 3]
    steep = norms.steepness()
    assert steep is not None
    assert math.isfinite(steep)
    found = bounds(other, images=0).convergence
    assert found.norms == pytest.approx([norms.norms[r] for r in found.rounds], rel=1e-4)
    assert found.losses[0] > found.losses[-1]
