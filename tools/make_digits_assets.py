"""Make the assets of the `digits` preset: a pretrained `resnet8` and a sheet of unlabelled glyphs.

Letters and digits are rendered from the fonts that ship with matplotlib, warped and re-stroked until they
look pen-drawn, and brought to 8x8 the way the UCI digits were: fitted into a 32x32 bitmap, then counted in
blocks of 4x4. No image of the digits data is read here; stroke width and margins were set once by looking at
unlabelled digits beside the glyphs. The 62 pretraining classes include the ten digits as fonts draw them.

    python tools/make_digits_assets.py [--out DIR] [--seed 0] [--check]

writes `resnet8.safetensors` (float16, no head) and `glyphs.png` (64 by 64 tiles of 8x8). With --check
nothing is written: both are made again and compared with what DIR holds. The same machine, libraries and
number of threads give the same bytes; `--threads` is 1 unless told.
"""

from __future__ import annotations

import argparse
import io
import json
import string
import sys
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import distance_transform_edt, map_coordinates
from torch import Tensor, nn

from perada.models.resnet import resnet

CHARACTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralBolIta"),
    *("cmb10", "cmmi10", "cmr10", "cmti10", "cmtt10"),
)
HELD_OUT_FONTS = ("DejaVuSansMono-Bold", "STIXGeneralItalic", "cmss10")  # for validation only
MEAN, STD = 0.3, 0.35  # of an image in 0..1; the preset normalises its clients' images by the same
CANVAS = 48  # the glyph is warped and re-stroked on a canvas of this many pixels
SIDE = 64  # tiles along each side of the sheet
TRAIN, VALID, SHEET = range(3)  # streams of random numbers

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]


def masters(fonts: tuple[str, ...]) -> list[list[Floats]]:
    """Every character of every font, upright and cropped to its ink, 0..1."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    out = []
    for name in fonts:
        font = ImageFont.truetype(str(folder / f"{name}.ttf"), 40, layout_engine=ImageFont.Layout.BASIC)
        row = []
        for character in CHARACTERS:
            image = Image.new("L", (96, 96))
            ImageDraw.Draw(image).text((24, 24), character, font=font, fill=255)
            row.append(np.asarray(image.crop(image.getbbox()), dtype=np.float64) / 255)
        out.append(row)
    return out


def spread(points: int) -> Floats:
    """[CANVAS, points]: linear interpolation from a coarse grid to the canvas."""
    at = np.linspace(0, points - 1, CANVAS)
    return np.clip(1 - np.abs(at[:, None] - np.arange(points)), 0, None)


WAVE, GRAIN = spread(4), spread(12)
GRID = np.stack(np.meshgrid(np.arange(CANVAS), np.arange(CANVAS), indexing="ij")) - (CANVAS - 1) / 2.0


def warp(rng: np.random.Generator, master: Floats) -> Floats:
    """Rotation, shear, scale along each axis and a slow wave, about the middle of the canvas."""
    turn, shear = np.deg2rad(rng.uniform(-18, 18)), rng.uniform(-0.3, 0.3)
    height, width = master.shape
    size = 34 * np.exp(rng.uniform(-0.1, 0.1))
    squeeze = np.exp(rng.uniform(-0.25, 0.25))
    rotate = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    slant = np.array([[1.0, 0.0], [shear, 1.0]])
    longest = max(height, width)
    scale = np.diag([longest / size, longest / size * squeeze])
    waves = np.stack([WAVE @ rng.normal(0, 1.6, (4, 4)) @ WAVE.T for _ in range(2)])
    at = np.tensordot(scale @ slant @ rotate, GRID + waves, 1)
    at += (np.array([height, width]).reshape(2, 1, 1) - 1) / 2
    return map_coordinates(master, at, order=1)  # type: ignore[no-any-return]


def extent(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """left, top, right, bottom of what is set."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def stroke(rng: np.random.Generator, grey: Floats, ink: float) -> NDArray[np.bool_]:
    """Thicken or thin the strokes, with a shaky outline, until about `ink` of the fitted box is covered."""
    solid = grey > 0.5 * grey.max()
    distance = distance_transform_edt(~solid) - distance_transform_edt(solid)
    distance += GRAIN @ rng.normal(0, 0.5, (12, 12)) @ GRAIN.T
    left, top, right, bottom = extent(solid)
    wanted = ink * 32 * (bottom - top) * (right - left) / fitted_width(right - left, bottom - top)
    level = np.partition(distance.ravel(), int(wanted))[int(wanted)]
    return distance <= np.clip(level, -2.0, 3.5)  # type: ignore[no-any-return]


def fitted_width(width: int, height: int) -> int:
    """Of the 32x32 bitmap: the height is filled, the width follows but leaves a margin."""
    return int(np.clip(round(32 * width / height), 10, 23))


def glyph(rng: np.random.Generator, master: Floats) -> Bytes:
    """One 8x8 image, 0..255, in steps of a sixteenth but for a little noise where there is ink."""
    mask = stroke(rng, warp(rng, master), float(np.clip(rng.normal(0.33, 0.035), 0.24, 0.44)))
    left, top, right, bottom = box = extent(mask)
    width = fitted_width(right - left, bottom - top)
    image = Image.fromarray(mask.astype(np.uint8) * 255)
    fitted = np.asarray(image.resize((width, 32), Image.Resampling.BILINEAR, box=box)) > 127
    bitmap = np.zeros((32, 32))
    start = int(np.clip((32 - width) // 2 + rng.integers(-1, 2), 0, 32 - width))
    bitmap[:, start : start + width] = fitted
    counts = bitmap.reshape(8, 4, 8, 4).sum((1, 3))
    counts += (counts > 0) * rng.normal(0, 0.5, (8, 8))
    return np.clip(np.rint(counts * 255 / 16), 0, 255).astype(np.uint8)


def render(count: int, seed: int, stream: int, fonts: tuple[str, ...]) -> tuple[Bytes, NDArray[np.int64]]:
    """`count` glyphs [count, 8, 8] in random order, every class as often as the others, and their classes."""
    rng = np.random.default_rng([seed, stream])
    held = masters(fonts)
    labels = rng.permutation(np.arange(count) % len(CHARACTERS))
    images = [glyph(rng, held[rng.integers(len(fonts))][label]) for label in labels]
    return np.stack(images), labels


def batch(images: Bytes) -> Tensor:
    """What the network takes: three equal channels, normalised."""
    grey = (torch.from_numpy(images).float() / 255 - MEAN) / STD
    return grey[:, None].expand(-1, 3, -1, -1)


def accuracy(net: nn.Module, images: Bytes, labels: NDArray[np.int64]) -> float:
    net.eval()
    with torch.no_grad():
        return float((net(batch(images)).argmax(1).numpy() == labels).mean())


def pretrain(images: Bytes, labels: NDArray[np.int64], seed: int, epochs: int) -> nn.Module:
    """Cross-entropy over the 62 characters; SGD with momentum, the step size up briefly and down a cosine."""
    net = resnet("resnet8", len(CHARACTERS), seed)
    size = min(128, len(images))
    steps = epochs * (len(images) // size)
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    plan = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=steps, pct_start=0.1)
    inputs, targets = batch(images), torch.from_numpy(labels)
    draw = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        net.train()
        total, order = 0.0, torch.randperm(len(images), generator=draw)
        for chosen in order[: len(order) // size * size].split(size):
            loss = nn.functional.cross_entropy(net(inputs[chosen]), targets[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            plan.step()
            total += loss.item() * size
        print(f"epoch {epoch + 1}/{epochs}: loss {total / len(order):.3f}", flush=True)
    return net


def pack(net: nn.Module, about: dict[str, str]) -> bytes:
    """A safetensors file of the backbone, written here because the library promises no order of keys."""
    header: dict[str, object] = {"__metadata__": about}
    body = b""
    for name, tensor in sorted(net.state_dict().items()):
        if name.startswith("fc.") or name.endswith("num_batches_tracked"):
            continue
        data = tensor.numpy().astype("<f2").tobytes()
        place = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F16", "shape": list(tensor.shape), "data_offsets": place}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def make_weights(seed: int, images: int, epochs: int) -> bytes:
    start = time.perf_counter()
    seen, classes = render(images, seed, TRAIN, FONTS)
    print(f"{images} glyphs of {len(FONTS)} fonts in {time.perf_counter() - start:.0f} s", flush=True)
    print(f"mean {seen.mean() / 255:.3f}, std {seen.std() / 255:.3f}; normalised by {MEAN}, {STD}")
    start = time.perf_counter()
    net = pretrain(seen, classes, seed, epochs)
    score = accuracy(net, *render(min(images, 6200), seed, VALID, HELD_OUT_FONTS))
    took = time.perf_counter() - start
    print(f"{len(CHARACTERS)}-way accuracy on fonts held out: {score:.4f}; pretrained in {took:.0f} s")
    about = {"made_by": "tools/make_digits_assets.py", "seed": str(seed), "val_accuracy": f"{score:.4f}"}
    return pack(net, {**about, "fonts": f"matplotlib {matplotlib.__version__}"})


def make_sheet(seed: int) -> bytes:
    tiles, _ = render(SIDE * SIDE, seed, SHEET, FONTS)
    sheet = tiles.reshape(SIDE, SIDE, 8, 8).swapaxes(1, 2).reshape(SIDE * 8, SIDE * 8)
    file = io.BytesIO()
    Image.fromarray(sheet).save(file, "PNG", optimize=True)
    return file.getvalue()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the assets of the digits preset.")
    assets = Path(__file__).resolve().parents[1] / "src" / "perada" / "data" / "assets"
    parser.add_argument("--out", type=Path, default=assets, help="folder for the two files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=80_000, help="glyphs to pretrain on")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="write nothing; compare with the files in --out")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    start, wrong = time.perf_counter(), 0
    made = {
        "glyphs.png": make_sheet(args.seed),
        "resnet8.safetensors": make_weights(args.seed, args.images, args.epochs),
    }
    for name, data in made.items():
        path = args.out / name
        if args.check:
            same = path.is_file() and path.read_bytes() == data
            wrong += not same
            print(f"{path}: {'same' if same else 'DIFFERS'}")
        else:
            args.out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            print(f"{path}: {len(data)} bytes")
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
