"""Predicts with a client's personal model and the global one in a single pass, and notices drift."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..client.scores import logits_of
from ..data import Federation, read_image
from ..errors import InputError, RunError
from ..lanes import LaneModel, State, stack
from .drift import Calibration, Drift, Verdict, answer, at_home, balanced, everywhere, judged, likeness, mixed

Images = Tensor | str | Path | Sequence[str | Path]


def pixels_from(images: Images, federation: Federation) -> Tensor:
    """Returns files, or images uint8 `[n, C, H, W]`, as the network's images."""
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.shape[1:] != federation.images.shape[1:]:
            raise InputError(f"images must be uint8 [n, {', '.join(map(str, federation.images.shape[1:]))}]")
        return images
    paths = [images] if isinstance(images, str | Path) else images
    if not len(paths):
        raise InputError("no images: give at least one")
    pixels = np.stack([read_image(Path(p), federation.images.shape[-1]) for p in paths])
    if federation.images.shape[1] == 1:
        pixels = np.rint(pixels.mean(1, keepdims=True)).astype(np.uint8)
    return torch.from_numpy(pixels)


@dataclass(frozen=True)
class Answers:
    """Predictions on some images, and what was said of the window that each is in."""

    probabilities: Tensor  # [n, classes], on the CPU
    z: Tensor  # [n]: how far the image's window is from home
    share: Tensor  # [n]: the estimated share of home images in it
    drifted: Tensor  # [n]

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
        if not self.drifted:
            return f"These {self.images} images look like those of {self.client}. Nothing needs to be done."
        name = max(self.mix, key=lambda n: self.mix[n] - self.home[n])
        change = f"{name!r} is {self.mix[name]:.0%} of them, and {self.home[name]:.0%} at home"
        return (
            f"These {self.images} images do not look like those of {self.client}: about {self.share:.0%} are as at "
            f"home; {change}. Check where they come from, predict them with --drift, and have some of them labelled."
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

    @classmethod
    def of(cls, client: str, model: LaneModel, personal: State, shared: State, *rest: Any) -> Predictor:
        """Returns a predictor of two states with one lane each. rest: federation, calibration, options."""
        return cls(client, model, stack(personal, shared), *rest)

    def logits(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits of both models on images uint8 `[n, C, H, W]`; refuses what is not finite in both."""
        v, w = logits_of(self.model, self.lanes, self.federation, images)
        if not (v.isfinite().all(-1) | w.isfinite().all(-1)).all():
            raise RunError(f"the models of {self.client} predict what is not a number", "training may have diverged")
        return v, w

    def predict(self, images: Images) -> Answers:
        """Returns the predictions of images: one, a window, or more, judged in groups of `Drift.window`."""
        return self.stream().push(images)

    def stream(self, state: Mapping[str, Any] | None = None) -> Stream:
        """Returns a stream, which remembers the last images. state: what `Stream.state` returned before."""
        return Stream(self, state)

    def check(self, images: Images) -> Check:
        """Returns whether images look like the client's, all of them judged as one window."""
        by = self.calibration
        if not by.images:
            raise InputError(f"{self.client} has no validation images to compare with: raise DataOptions.val")
        if not by.deviation:
            raise InputError(f"{self.client} has all classes equally often, so its images look like everybody's")
        v, w = self.logits(pixels_from(images, self.federation))
        said = answer(by, v, w, self.options, size=len(v))
        shares, counts = said.probabilities.mean(0).tolist(), by.own
        z, share = float(said.verdict.z[0]), float(said.verdict.share[0])
        names = self.federation.classes
        both = (dict(zip(names, values, strict=True)) for values in (shares, counts))
        return Check(self.client, len(v), z, self.options.threshold, share, *both)


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
        predictor = self.predictor
        return self.push_logits(*predictor.logits(pixels_from(images, predictor.federation)))

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
