"""PerAda in one file of plain PyTorch: Algorithm 1 of the paper, one client after another.

    python examples/perada_plain.py [ROUNDS]        # on the embedded digits; a few seconds per round

Nothing here uses PerAda's code: of the package this file takes only two assets, the pretrained backbone and the
public images. `tests/test_plain_example.py` shows that `perada train` computes the same numbers.

    u    the pretrained backbone, frozen
    v_m  the personal adapter of client m, which never leaves it
    θ_m  the local adapter of client m, which it uploads
    w    the global adapter, which the server distils from the θ_m and broadcasts
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from itertools import count, islice

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load
from sklearn.datasets import load_digits
from torch import Tensor, nn

Adapter = dict[str, Tensor]  # what is trained, by name, and the running statistics of every batch norm
Batch = tuple[Tensor, Tensor]  # images and labels


class AdaptedConv(nn.Conv2d):
    """A frozen 3×3 convolution, then its adapter: y + Conv1x1(Dropout(BN(y))), which starts as the identity."""

    def __init__(self, inputs: int, width: int, stride: int, dropout: float) -> None:
        super().__init__(inputs, width, 3, stride, padding=1, bias=False)
        norm, matrix = nn.BatchNorm2d(width), nn.Conv2d(width, width, 1, bias=False)
        nn.init.normal_(matrix.weight, std=1e-4)
        self.adapter = nn.Sequential(OrderedDict(norm=norm, dropout=nn.Dropout(dropout), conv=matrix))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.adapter(y)


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = AdaptedConv(inputs, width, stride, dropout), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = AdaptedConv(width, width, 1, dropout), nn.BatchNorm2d(width)
        self.downsample = nn.Sequential()
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class ResNet8(nn.Module):
    def __init__(self, classes: int = 10, dropout: float = 0.3) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16, 1, dropout))
        self.layer2 = nn.Sequential(Block(16, 32, 2, dropout))
        self.layer3 = nn.Sequential(Block(32, 64, 2, dropout))
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(x))).mean((2, 3)))


def trained(net: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the adapters, the affines of bn1 and bn2, and the head. All else is the frozen backbone.

    An adapter norm's bias is left out: it adds a constant to each channel, which the next batch norm subtracts.
    """
    chosen = (".adapter.norm.weight", ".adapter.conv.weight", "bn1.weight", "bn1.bias", "bn2.weight", "bn2.bias")
    return {n: p for n, p in net.named_parameters() if n.startswith("fc.") or n.endswith(chosen)}


def statistics(net: nn.Module) -> Adapter:
    return {n: t.clone() for n, t in net.named_buffers() if n.endswith(("running_mean", "running_var"))}


def adapter(net: nn.Module) -> Adapter:
    return {n: p.detach().clone() for n, p in trained(net).items()} | statistics(net)


def sgd(net: nn.Module, start: Adapter, data: Sequence[Batch], lr: float, lam: float, centre: Adapter) -> Adapter:
    """Trains an adapter on L_m + λ/2 ‖adapter − centre‖², one SGD step per batch."""
    net.load_state_dict(start, strict=False)
    net.train()
    params = trained(net)
    for images, labels in data:
        gradients = torch.autograd.grad(F.cross_entropy(net(images), labels), list(params.values()))
        with torch.no_grad():
            for (name, p), gradient in zip(params.items(), gradients, strict=True):
                p -= lr * (gradient + lam * (p - centre[name]))
    return adapter(net)


@torch.no_grad()
def teach(net: nn.Module, uploads: Sequence[Adapter], images: Tensor) -> Tensor:
    """Returns the mean of the clients' logits. They normalise with these images' statistics: their own mislead them."""
    net.eval()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.train()
    logits = []
    for theta in uploads:
        net.load_state_dict(theta, strict=False)
        logits.append(net(images))
    return torch.stack(logits).mean(0)


def distill(net: nn.Module, w: Adapter, uploads: Sequence[Adapter], public: Sequence[Tensor], lr: float) -> Adapter:
    """Trains w with Adam on KL(softmax(teacher) ‖ softmax(student)), one step per public batch; its statistics stay."""
    teachers = [teach(net, uploads, images) for images in public]
    net.load_state_dict(w, strict=False)
    net.train()
    adam = torch.optim.Adam(trained(net).values(), lr)
    for images, teacher in zip(public, teachers, strict=True):
        student = net(images).log_softmax(1)
        adam.zero_grad()
        F.kl_div(student, teacher.log_softmax(1), reduction="batchmean", log_target=True).backward()
        adam.step()
    return adapter(net) | {name: w[name] for name in statistics(net)}


def perada(
    net: nn.Module,
    clients: int,
    cohort: Callable[[int], Sequence[int]],
    data: Callable[[int, int], Sequence[Batch]],
    public: Callable[[int], Sequence[Tensor]],
    lam: float = 1.0,
    lr: float = 0.02,
    server_lr: float = 1e-3,
) -> Iterator[tuple[Adapter, list[Adapter]]]:
    """Yields the global adapter w and the personal adapters v after every round.

    cohort(t): the clients of round t; data(t, m): the batches of client m; public(t): the batches of the server.
    """
    w = adapter(net)
    v = [w] * clients
    for t in count():
        uploads = []
        for m in cohort(t):
            batches = data(t, m)
            v[m] = sgd(net, v[m], batches, lr, lam, centre=w)  # the personal step; v[m] stays with the client
            uploads.append(sgd(net, w, batches, lr, 0.0, centre=w))  # the local step
        w = {name: torch.stack([theta[name] for theta in uploads]).mean(0) for name in w}
        w = distill(net, w, uploads, public(t), server_lr)
        yield w, list(v)


def main(rounds: int = 5, clients: int = 8, alpha: float = 0.3) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    assets = resources.files("perada") / "data" / "assets"

    def normalised(bytes: np.ndarray) -> Tensor:
        return ((torch.from_numpy(bytes)[:, None].float() / 255 - 0.3) / 0.35).repeat(1, 3, 1, 1)

    digits = load_digits()
    images, labels = normalised(np.rint(digits.images * 255 / 16)), torch.from_numpy(digits.target)
    owner = np.zeros(len(labels), int)
    for digit in range(10):  # the share of each client in each digit is a draw from Dir(α)
        mine = digits.target == digit
        owner[mine] = rng.choice(clients, mine.sum(), p=rng.dirichlet([alpha] * clients))
    parts = [rng.permutation(np.flatnonzero(owner == m)) for m in range(clients)]
    train, test = [p[len(p) // 4 :] for p in parts], [p[: len(p) // 4] for p in parts]
    with (assets / "glyphs.png").open("rb") as file:  # letters and digits without labels, 64 × 64 in one sheet
        sheet = np.array(Image.open(file).convert("L"))
    glyphs = normalised(sheet.reshape(64, 8, 64, 8).transpose(0, 2, 1, 3).reshape(-1, 8, 8))

    net = ResNet8()
    backbone = load((assets / "resnet8.safetensors").read_bytes())
    net.load_state_dict({n: t for n, t in backbone.items() if not n.startswith("fc.")}, strict=False)

    def data(t: int, m: int) -> list[Batch]:
        order = np.concatenate([rng.permutation(train[m]) for _ in range(5)])  # five epochs
        return [(images[i], labels[i]) for i in np.split(order, range(16, len(order), 16)) if len(i) == 16]

    def accuracy(values: Adapter, index: np.ndarray) -> float:
        net.load_state_dict(values, strict=False)
        with torch.no_grad():
            return 100 * (net.eval()(images[index]).argmax(1) == labels[index]).float().mean().item()

    def public(t: int) -> list[Tensor]:
        return [glyphs[rng.choice(len(glyphs), 128, replace=False)] for _ in range(10)]

    every = np.concatenate(test)
    run = perada(net, clients, lambda t: rng.permutation(clients)[:4].tolist(), data, public)
    for t, (w, v) in enumerate(islice(run, rounds), 1):
        own = np.mean([accuracy(one, mine) for one, mine in zip(v, test, strict=True)])
        all_ = np.mean([accuracy(one, every) for one in v])
        print(f"round {t}: personal models {own:.1f}% on their own digits and {all_:.1f}% on everybody's,", end=" ")
        print(f"the global model {accuracy(w, every):.1f}%")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:2]))
