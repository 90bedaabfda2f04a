"""Trains one vision transformer on public images, so that experiments have a pretrained one.

    python -m experiments.train_vit --data FOLDER --out vit_small_patch4_cifar100.safetensors

By default `vit_small_patch4` on CIFAR-100's 50,000 training images and their fine labels at 32 pixels, for 200 epochs:
AdamW with warm-up and a cosine schedule, random crops, mixup, label smoothing. Official test images are never read into
a batch. A share of the training images is held out to measure accuracy; nothing is chosen by it. The weights have
timm's keys. A JSON file beside them says what the network has seen. No weights are committed.

The network has seen the labels of CIFAR-100. So a run that distils on CIFAR-100 distils on images that its backbone
knows: say so wherever its numbers are shown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import Tensor, nn

from perada.data import DataOptions
from perada.data.augment import resized_crop
from perada.data.named import read_source
from perada.errors import InputError
from perada.lanes import key_of
from perada.models import backbone
from perada.runs.files import write_output

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # as in the preset cifar10


def prepared(images: Tensor) -> Tensor:
    """Returns uint8 images as normalised ones in three channels."""
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (MEAN, STD))
    return (images.expand(-1, 3, -1, -1).float() / 255 - mean) / std


def schedule(step: int, steps: int, warm: int) -> float:
    """Returns the rate of a step as a share of the highest."""
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(steps - warm, 1)))


def mixed(images: Tensor, labels: Tensor, classes: int, draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Returns mixup's images and soft labels: each image with another one of the batch."""
    share = float(draw.beta(0.8, 0.8))
    other = torch.from_numpy(draw.permutation(len(images))).to(images.device)
    soft = F.one_hot(labels, classes).float()
    return share * images + (1 - share) * images[other], share * soft + (1 - share) * soft[other]


def train(net: nn.Module, images: Tensor, labels: Tensor, args: argparse.Namespace, classes: int) -> None:
    """Trains a network in place; prints a line every few epochs."""
    decayed = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr)
    each = max(len(images) // args.batch, 1)
    steps, warm = each * args.epochs, each * args.warmup
    half = torch.autocast("cuda", torch.bfloat16) if images.is_cuda else nullcontext()
    draw, begin, step = np.random.default_rng(args.seed), time.perf_counter(), 0
    for epoch in range(args.epochs):
        order = torch.from_numpy(draw.permutation(len(images))).to(images.device)
        total = torch.zeros((), device=images.device)
        for chunk in torch.split(order, args.batch)[:each]:
            key = torch.tensor([key_of(args.seed, "views", step)], device=images.device)
            batch, soft = mixed(prepared(resized_crop(images[chunk], key)), labels[chunk], classes, draw)
            for group in optimiser.param_groups:
                group["lr"] = args.lr * schedule(step, steps, warm)
            with half:
                loss = F.cross_entropy(net(batch).float(), soft, label_smoothing=0.1)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            step, total = step + 1, total + loss.detach()
        if epoch % 10 == 0 or epoch == args.epochs - 1:
            minutes = (time.perf_counter() - begin) / 60
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {float(total) / each:.3f}, {minutes:.1f} min", file=sys.stderr
            )


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Returns the share of images in % whose class is predicted."""
    parts = zip(torch.split(images, 500), torch.split(labels, 500), strict=True)
    hits = [(net(prepared(x)).argmax(1) == y).sum() for x, y in parts]
    return 100 * float(torch.stack(hits).sum()) / len(images)


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="cifar100", help="a data set of `data.name`; folder: an .npz of your own")
    parser.add_argument("--data", default="", help="its folder or file, as in `data.root`")
    parser.add_argument("--backbone", default="vit_small_patch4")
    parser.add_argument("--out", type=Path, required=True, help="FILE.safetensors")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=10, help="epochs")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--held-out", type=float, default=0.02, help="share that accuracy is measured on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most", type=int, default=0, help="use only so many images (for a rehearsal)")
    return parser.parse_args(words)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains, writes both files, and returns what the JSON file says."""
    source = read_source(DataOptions(name=args.name, root=args.data))
    pixels, targets = np.asarray(source.images), np.asarray(source.targets)
    kept = np.flatnonzero(~source.test) if source.test is not None else np.arange(len(targets))
    kept = np.random.default_rng(args.seed).permutation(kept)[: args.most or None]
    device, classes, held = torch.device(args.device), len(source.classes), max(1, round(args.held_out * len(kept)))
    images, labels = torch.from_numpy(pixels[kept]).to(device), torch.from_numpy(targets[kept]).to(device)
    net = backbone(args.backbone, classes, args.seed, size=images.shape[-1]).net.to(device)
    train(net.train(), images[held:], labels[held:], args, classes)
    net.eval()
    content = save({n: t.half().cpu().contiguous() for n, t in net.state_dict().items()}, {"format": "pt"})
    digest = hashlib.sha256(images.cpu().numpy().data).hexdigest()
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "data")}
    about = {
        "backbone": args.backbone,
        "seen": f"{len(kept) - held} training images of {source.name} with their {classes} labels, nothing else",
        "images_sha256": digest,
        "pixels": int(images.shape[-1]),
        "mean": MEAN,
        "std": STD,
        "held_out": held,
        "held_out_accuracy": round(accuracy(net, images[:held], labels[:held]), 2),
        "weights_sha256": hashlib.sha256(content).hexdigest(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()},
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "date": date.today().isoformat(),
    }
    write_output(args.out, content)
    write_output(args.out.with_suffix(".json"), (json.dumps(about, indent=1) + "\n").encode())
    return about


def main(words: Sequence[str] | None = None) -> int:
    try:
        about = run(arguments(words))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(about, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
