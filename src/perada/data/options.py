"""The options of a data set and of its split, which are the keys of `[data]`."""

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ..errors import InputError, check_choices, unknown
from ..plugins import check
from .named import GROUP, SOURCES


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class DataOptions:
    """Which data set is read, and how it is split among clients."""

    name: str = _option("digits", "the data set: a known name, package.module:function, or an installed entry point")
    root: str = _option("", "folder or file with the data")
    clients: int = _option(20, "number of simulated clients; with partition=site there is one per site")
    partition: Literal["dirichlet", "iid", "shards", "site"] = _option("dirichlet", "who gets which training samples")
    alpha: float = _option(0.1, "concentration of partition=dirichlet; a smaller one makes clients less alike")
    cap: bool = _option(True, "a client that has N/M samples takes no more")
    min_per_class: int = _option(0, "training samples of each class for every client, before Dir(α) deals the rest")
    shards: int = _option(2, "runs of samples, sorted by label, that a client gets with partition=shards")
    meta_min: int = _option(2000, "multi-label: training images from which a combination of labels is its own class")
    val: float = _option(0.1, "share of the data (of the official training data, if it has a test set) for validation")
    test: float = _option(0.2, "share of the data for testing, where the data set has no test set")
    server_val: float = _option(0.0, "share of the training data that the server holds, labelled, for its guard")
    seed: int = _option(0, "seed of the split; the seed of a run does not change who holds what")
    size: int = _option(64, "pixels that image files are scaled to; arrays (CIFAR, .npz) keep their size")
    labels: tuple[str, ...] = _option((), "multi-label: use only these labels; empty uses all")
    site: str = _option("site", "column of a manifest that names the owner of an image")
    uncertain: Literal["ones", "zeros", "ignore"] = _option("ones", "what CheXpert's -1 means; ignore drops the image")
    normalise: Literal["data", "imagenet", "backbone"] = _option(
        "data", "whose mean and std: these, or what it expects"
    )
    augment: Literal["none", "flip", "crop", "resized-crop"] = _option("none", "random views of training images")
    resident: Literal["auto", "yes", "no"] = _option("auto", "keep images on the compute device; no streams them")
    skip_bad: bool = _option(False, "skip images that cannot be read")

    def __post_init__(self) -> None:
        check("data set", GROUP, self.name, SOURCES)
        check_choices(self)
        if self.name == "digits" and self.root:
            raise ValueError("name=digits is part of the package and reads no path: for your own images use 'folder'")
        if not self.alpha > 0:
            raise ValueError(f"alpha must be above 0, not {self.alpha}")
        for name, least in (("clients", 1), ("min_per_class", 0), ("shards", 1), ("meta_min", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.min_per_class and self.partition != "dirichlet":
            raise ValueError(f"min_per_class needs DataOptions.partition=dirichlet, not {self.partition}")
        for name in ("val", "test", "server_val"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        if self.val + self.test + self.server_val >= 1:
            raise ValueError(
                "val + DataOptions.test + DataOptions.server_val must be below 1, to leave something to train on"
            )
        if self.size < 8:
            raise ValueError(f"size must be at least 8 pixels, not {self.size}")

    @classmethod
    def of(cls, **options: Any) -> Self:
        """Returns the options, or refuses a wrong name or value in one line."""
        known = cls.__dataclass_fields__
        for name in options:
            if name not in known:
                raise unknown("option", name, known)
        try:
            return cls(**options)
        except ValueError as error:
            raise InputError(f"DataOptions.{error}") from error
        except TypeError as error:  # text for a number, say
            raise InputError(f"cannot make DataOptions of {options}: {error}") from error
