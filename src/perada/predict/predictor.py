"""Predicts with a client's personal model and the global one in a single pass, and notices drift."""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..client.scores import logits_of
from ..data import Federation
from ..data.fit import Fit
from ..errors import InputError, RunError
from ..lanes import LaneModel, State, rng_of, stack
from .drift import Calibration, Drift, Verdict, answer, at_home, balanced, everywhere, farthest, judged, likeness, mixed
from .pictures import Images, Say, batches, silent

HALF = 0.5  # an estimated share of home images below which nobody should be told that all is well


@dataclass(frozen=True)
class Answers:
    """Predictions on some images, and what was said of the window that each is in."""

    probabilities: Tensor  # [n, classes], on the CPU
    z: Tensor  # [n]: how far the image's window is from home
    share: Tensor  # [n]: the estimated share of home images in it
    drifted: Tensor  # [n]

    def at(self, rows: Tensor) -> Answers:
        """Returns the answers of these images, in this order."""
        return Answers(self.probabilities[rows], self.z[rows], self.share[rows], self.drifted[rows])

    @classmethod
    def of(cls, probabilities: Tensor, verdict: Verdict, at: Tensor) -> Answers:
        return cls(*(t.cpu() for t in (probabilities, verdict.z[at], verdict.share[at], verdict.drifted[at])))


@dataclass(frozen=True)
class Check:
    """Whether images look like a client's."""

    client: str
    images: int
    z: float
    threshold: float
    share: float  # of home images
    mix: Mapping[str, float]  # the estimated share of each class; of multi-label data how often each label is there
    home: Mapping[str, float]  # the same of the client's training data

    @property
    def drifted(self) -> bool:
        return self.z > self.threshold

    @property
    def sentence(self) -> str:
        """Returns what was found, and what to do."""
        one = self.images == 1
        these = "This image" if one else f"These {self.images} images"
        if not self.drifted and self.share < HALF:
            return (
                f"{these} may not look like those of {self.client}: about {self.share:.0%} are as at home, but that "
                "may be chance. Give more images, or look at some of them."
            )
        if not self.drifted:
            return f"{these} look{'s' * one} like those of {self.client}. Nothing needs to be done."
        name = max(self.mix, key=lambda n: self.mix[n] - self.home[n])
        change = f"{name!r} is {self.mix[name]:.0%} of them, and {self.home[name]:.0%} at home"
        return (
            f"{these} do{'es' * one} not look like those of {self.client}: about {self.share:.0%} are as at home; "
            f"{change}. Check where they come from, predict them with --drift, and have some of them labelled."
        )

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "mix": dict(self.mix), "home": dict(self.home), "drift": self.drifted} | {
            "sentence": self.sentence
        }


@dataclass(frozen=True)
class Predictor:
    """A client's models and its calibration. The personal and the global lane share one pass of the backbone."""

    client: str
    model: LaneModel
    lanes: State  # two: the personal one, then the global one
    federation: Federation  # classes, image shape and normalisation count
    calibration: Calibration
    options: Drift = field(default_factory=Drift)
    fit: Fit = "crop"  # how pictures fit the network's input
    say: Say = silent  # receives what is not used of the pictures

    @classmethod
    def of(cls, client: str, model: LaneModel, personal: State, shared: State, *rest: Any) -> Predictor:
        """Returns a predictor of two states with one lane each. rest: federation, calibration, options, fit, say."""
        return cls(client, model, stack(personal, shared), *rest)

    def logits(self, images: Images) -> tuple[Tensor, Tensor]:
        """Returns the logits of both models on images; refuses what is not finite in both."""
        groups = batches(images, self.federation, self.fit, self.say)
        v, w = torch.cat([logits_of(self.model, self.lanes, self.federation, pixels) for pixels in groups], 1)
        if not (v.isfinite().all(-1) | w.isfinite().all(-1)).all():
            raise RunError(f"the models of {self.client} predict what is not a number", "training may have diverged")
        return v, w

    def predict(self, images: Images) -> Answers:
        """Returns the predictions of images, in their order.

        More than `Drift.window` of them are judged in windows of images drawn at random, always the same ones: a
        folder sorted by class would give windows of one class. For images in the order of time use `stream`.
        """
        v, w = self.logits(images)
        order = torch.from_numpy(rng_of(0, "drift", "predict").permutation(len(v))).to(v.device)
        return self.stream().push_logits(v[order], w[order]).at(order.argsort().cpu())

    def stream(self, state: Mapping[str, Any] | None = None) -> Stream:
        """Returns a stream, which remembers the last images. state: what `Stream.state` returned before."""
        return Stream(self, state)

    def check(self, images: Images) -> Check:
        """Returns whether images look like the client's, all of them judged as one window."""
        by = self.calibration
        if not by.images:
            raise InputError(f"{self.client} has no validation images to compare with: raise DataOptions.val")
        if not by.deviation:
            raise InputError(f"{self.client} has all classes equally often, so drift cannot be noticed there")
        v, w = self.logits(images)
        self._refuse_blind(len(v))
        said = answer(by, v, w, self.options, size=len(v))
        shares, counts = said.probabilities.mean(0).tolist(), by.own
        z, share = float(said.verdict.z[0]), float(said.verdict.share[0])
        names = self.federation.classes
        both = (dict(zip(names, values, strict=True)) for values in (shares, counts))
        return Check(self.client, len(v), z, self.options.threshold, share, *both)

    def _refuse_blind(self, images: int) -> None:
        """Refuses so many images if they would pass the test whatever they show."""
        by, threshold = self.calibration, self.options.threshold
        if farthest(by, images) > threshold:
            return
        if farthest(by, math.inf) > threshold:
            few = "1 image is" if images == 1 else f"{images} images are"
            raise InputError(f"{few} too few to notice drift at {self.client}: give more")
        raise InputError(
            f"{self.client} has all classes nearly equally often, or too few validation images ({by.images}), so drift "
            "cannot be noticed there"
        )


class Stream:
    """Predicts images as they come. The last `Drift.window` of them are the window; of each, one number is remembered.

    An image is judged by the window that ends with the images it came with. So a window given at once, and the same
    images one by one, end in the same verdict, and its last image has the same prediction.
    """

    def __init__(self, predictor: Predictor, state: Mapping[str, Any] | None = None) -> None:
        self.predictor = predictor
        self._recent = deque[float](maxlen=predictor.options.window)
        if state is not None:
            self._recent.extend(self._checked(state))

    def push(self, images: Images) -> Answers:
        """Returns the predictions of the next images."""
        return self.push_logits(*self.predictor.logits(images))

    def push_logits(self, v: Tensor, w: Tensor) -> Answers:
        """Returns the predictions of the next images, of their logits `[n, classes]`."""
        by, options = self.predictor.calibration, self.predictor.options
        b = balanced(by, v, w)
        home, abroad, s, parts = at_home(by, v, w), everywhere(by, b), likeness(by, b), list[Answers]()
        for rows in torch.split(torch.arange(len(s)), options.window):
            self._recent.extend(s[rows].tolist())
            verdict = judged(by, torch.tensor([list(self._recent)], dtype=s.dtype, device=s.device), options.threshold)
            at = torch.zeros(len(rows), dtype=torch.int64, device=s.device)
            parts.append(Answers.of(mixed(home[rows], abroad[rows], s[rows], verdict.used[at]), verdict, at))
        return Answers(*(torch.cat([getattr(p, n) for p in parts]) for n in ("probabilities", "z", "share", "drifted")))

    def over(self, images: Iterable[Images]) -> Iterator[Answers]:
        """Yields the predictions of one group of images after another."""
        for group in images:
            yield self.push(group)

    def state(self) -> dict[str, Any]:
        """Returns what the stream remembers, for a JSON file: numbers, no images."""
        return {**self._about(), "likeness": list(self._recent)}

    def _about(self) -> dict[str, Any]:
        told = json.dumps(self.predictor.calibration.as_dict(), sort_keys=True)
        window = self.predictor.options.window
        return {
            "client": self.predictor.client,
            "window": window,
            "calibration": hashlib.sha256(told.encode()).hexdigest(),
        }

    def _checked(self, state: Mapping[str, Any]) -> list[float]:
        """Returns the numbers of a saved state; refuses that of another stream."""
        for key, value in self._about().items():
            if state.get(key) != value:
                raise InputError(f"the state of the stream has another {key}: begin a new stream")
        numbers = state.get("likeness")
        if not isinstance(numbers, list) or not all(isinstance(n, int | float) for n in numbers):
            raise InputError("the state of the stream is damaged: begin a new stream")
        return [float(n) for n in numbers]
