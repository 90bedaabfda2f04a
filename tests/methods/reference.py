"""Every method again, as its paper has it: one client after another, one ordinary torch module at a time.

Nothing here knows of lanes, of a trainer or of `perada.methods`: a model is a dictionary of its values, training
is a deep copy of a module, `torch.autograd.grad` and the update written out, and parts of a model are rules on
names. Of perada it takes the order of the batches, who takes part, and the settings of a run.

A reference is a generator: what server and clients hold after the first round, after the second, and so on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perada.data.batches import sample_stream, steps_of

Values = dict[str, Tensor]  # parameters and running statistics of one model, by name
Rule = Callable[[str], bool]  # which of them
Data = list[tuple[Tensor, Tensor]]


@dataclass
class Held:
    """What there is between two rounds."""

    broadcast: Values
    kept: list[Values]  # by client; empty where clients keep nothing
    personal: list[Values]  # by client, or the one that all share
    server: Values = field(default_factory=dict)


# Parts of a model.


def is_statistic(name: str) -> bool:
    return name.endswith((".running_mean", ".running_var"))


def of_all(name: str) -> bool:
    return True


def of_head(name: str) -> bool:
    return name.startswith("fc.")


def of_input(name: str) -> bool:
    """The stem, and the first convolution and norm of every block."""
    return name.split(".")[-2] in ("conv1", "bn1")


def of_adapter_modules(name: str) -> bool:
    return ".adapter." in name


def of_adapter_set(name: str) -> bool:
    """PerAda's: adapters, affines of bn1 and bn2, head; statistics of every norm."""
    return is_statistic(name) or ".adapter." in name or of_head(name) or name.split(".")[-2] in ("bn1", "bn2")


def of_batch_norms(name: str) -> bool:
    """FedBN's: affines of bn1 and bn2; statistics of every norm, those of the downsample norms too."""
    return is_statistic(name) or name.split(".")[-2] in ("bn1", "bn2")


def rest(rule: Rule) -> Rule:
    return lambda name: not rule(name)


def some(values: Values, rule: Rule) -> Values:
    return {n: t for n, t in values.items() if rule(n)}


# Models.


def values_of(module: nn.Module) -> Values:
    return {n: t.detach().clone() for n, t in module.state_dict().items() if not n.endswith("num_batches_tracked")}


def loaded(net: nn.Module, values: Values, still: Rule = lambda name: False) -> nn.Module:
    """A copy with these values in training mode; the norms named by `still` keep their running statistics."""
    module = copy.deepcopy(net)
    missing = module.load_state_dict(values, strict=False)
    assert not missing.unexpected_keys
    for name, layer in module.named_modules():
        if isinstance(layer, nn.BatchNorm2d) and still(f"{name}.running_mean"):
            layer.momentum = 0.0
    return module.train()


def mixed(a: float, x: Values, b: float, y: Values) -> Values:
    return {n: a * x[n] + b * y[n] for n in x}


@dataclass
class World:
    """The run: a network with its start values, who holds which images, and the numbers of `[train]`."""

    net: nn.Module
    images: Tensor  # float64 [N, 3, H, W]
    targets: Tensor
    clients: list[tuple[str, Sequence[int]]]  # name and training samples
    cohort: Callable[[int], list[int]]
    public: list[Tensor]
    seed: int = 0
    epochs: int = 1
    batch: int = 8
    lr: float = 0.02
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    weighting: str = "uniform"
    distill_steps: int = 3
    distill_lr: float = 1e-3
    temperature: float = 1.0
    inert: Rule = lambda name: name.endswith(".adapter.norm.bias")  # a batch norm behind the adapter takes it off again

    def start(self) -> Values:
        return values_of(self.net)

    def start_each(self, rule: Rule = of_all) -> list[Values]:
        return [some(self.start(), rule) for _ in self.clients]

    def data(self, round: int, client: int, epochs: int = 0) -> Data:
        name, train = self.clients[client]
        steps = steps_of(len(train), self.batch, epochs or self.epochs)
        stream = torch.from_numpy(sample_stream(train, steps * self.batch, self.seed, round, name))
        return [(self.images[i], self.targets[i]) for i in stream.split(self.batch)]

    def mean(self, models: list[Values], cohort: list[int]) -> Values:
        sizes = [len(self.clients[m][1]) if self.weighting == "samples" else 1 for m in cohort]
        return {n: sum(s / sum(sizes) * m[n] for s, m in zip(sizes, models, strict=True)) for n in models[0]}

    def gradient(self, module: nn.Module, batch: tuple[Tensor, Tensor], names: list[str]) -> Values:
        """Of the mean cross-entropy, cut to length `clip`, plus weight decay. Statistics move in the module."""
        params = dict(module.named_parameters())
        loss = F.cross_entropy(module(batch[0]), batch[1])
        grads = dict(zip(names, torch.autograd.grad(loss, [params[n] for n in names]), strict=True))
        length = math.sqrt(sum(float((g * g).sum()) for g in grads.values()))
        cut = self.clip / length if self.clip and length > self.clip else 1.0
        return {n: cut * g + self.weight_decay * params[n].detach() for n, g in grads.items()}

    def sgd(
        self,
        start: Values,
        data: Data,
        part: Rule = of_all,
        lr: float = 0.0,
        extra: Callable[[str, Tensor], Tensor] | None = None,
    ) -> Values:
        """Train the part on the data; `extra(name, p)` is added to the gradient. All values of the model come back.

        The bias of an adapter's norm adds a constant that the next norm takes off again: nothing moves it.
        """
        module = loaded(self.net, start, still=rest(part))
        params = {n: p for n, p in module.named_parameters() if part(n) and not self.inert(n)}
        speed = {n: torch.zeros_like(p) for n, p in params.items()}
        for batch in data:
            grads = self.gradient(module, batch, list(params))
            with torch.no_grad():
                for n, p in params.items():
                    g = grads[n] + extra(n, p) if extra else grads[n]
                    speed[n] = self.momentum * speed[n] + g
                    p -= (lr or self.lr) * speed[n]
        return values_of(module)

    def pulled(self, start: Values, data: Data, lam: float, centre: Values, part: Rule = of_all, lr: float = 0.0):
        """SGD on the loss plus λ/2 ‖p − centre‖²."""
        return self.sgd(start, data, part, lr, lambda n, p: lam * (p - centre[n]))

    def distilled(self, round: int, average: Values, teachers: list[Values], part: Rule = of_all) -> Values:
        """Adam with a cosine rate on T² KL(σ(mean logits / T) ‖ σ(student / T)); the average's statistics stay. A round
        begins with the first chunk, or, if no round gets through all, with the one that is next."""
        chunks = len(self.public)
        begin = round * self.distill_steps if self.distill_steps < chunks else 0
        with torch.no_grad():
            nets = [loaded(self.net, t, still=of_all) for t in teachers]
            targets = [sum(net(x) for net in nets) / len(nets) for x in self.public]
        module, t = loaded(self.net, average), self.temperature
        params = {n: p for n, p in module.named_parameters() if part(n) and not self.inert(n)}
        first = {n: torch.zeros_like(p) for n, p in params.items()}
        second = {n: torch.zeros_like(p) for n, p in params.items()}
        for step in range(self.distill_steps):
            at = (begin + step) % chunks
            p, log_q = (targets[at] / t).softmax(1), (module(self.public[at]) / t).log_softmax(1)
            loss = t * t * (p * (p.log() - log_q)).sum(1).mean()
            grads = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
            rate = self.distill_lr * (1 + math.cos(math.pi * step / self.distill_steps)) / 2
            with torch.no_grad():
                for n, p in params.items():
                    first[n] = 0.9 * first[n] + 0.1 * grads[n]
                    second[n] = 0.999 * second[n] + 0.001 * grads[n] ** 2
                    long = (second[n] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                    p -= rate * first[n] / (1 - 0.9 ** (step + 1)) / long
        found = values_of(module)
        return {n: average[n] if is_statistic(n) else found[n] for n in average}


Reference = Iterator[Held]


# One model for all.


def fedavg(world: World, mu: float = 0.0, distils: bool = False) -> Reference:
    """FedAvg; FedProx with mu; FedDF with distillation."""
    w = world.start()
    for round in count():
        cohort = world.cohort(round)
        uploads = [world.pulled(w, world.data(round, m), mu, w) for m in cohort]
        w = world.mean(uploads, cohort)
        if distils:
            w = world.distilled(round, w, uploads)
        yield Held(w, [], [w])


def fine_tuned(world: World, w: Values, round: int, personal_epochs: int = 0, personal_lr: float = 0.0) -> list[Values]:
    """The last stage of FedAvg+FT: all clients, from the global model."""
    return [world.sgd(w, world.data(round, m, personal_epochs), lr=personal_lr) for m in range(len(world.clients))]


def feddyn(world: World, alpha: float = 0.1) -> Reference:
    """Acar et al., Algorithm 1, with their g_m and h written out."""
    w, clients = world.start(), len(world.clients)
    weights = [n for n in w if not is_statistic(n)]
    h = {n: torch.zeros_like(w[n]) for n in weights}
    g = [dict(h) for _ in range(clients)]
    for round in count():
        cohort, theta = world.cohort(round), {}
        for m in cohort:
            extra = lambda n, p, g=g[m], w=w: -g[n] + alpha * (p - w[n])  # noqa: E731
            theta[m] = world.sgd(w, world.data(round, m), extra=extra)
            g[m] = {n: g[m][n] - alpha * (theta[m][n] - w[n]) for n in weights}
        h = {n: h[n] - alpha / clients * sum(theta[m][n] - w[n] for m in cohort) for n in weights}
        average = world.mean([theta[m] for m in cohort], cohort)
        w = {n: average[n] if is_statistic(n) else average[n] - h[n] / alpha for n in average}
        server = {**{f"w/{n}": t for n, t in w.items()}, **{f"h/{n}": t for n, t in h.items()}}
        yield Held(w, [dict(x) for x in g], [w], server)


def scaffold(world: World, server_lr: float = 1.0) -> Reference:
    """Karimireddy et al., Algorithm 1 with option II: x and c at the server, c_i at client i.

    Where the mean of the models is weighted, that of the control variates is not. Statistics have no control variate.
    """
    x, clients = world.start(), len(world.clients)
    weights = [n for n in x if not is_statistic(n)]
    c = {n: torch.zeros_like(x[n]) for n in weights}
    own = [dict(c) for _ in range(clients)]
    for round in count():
        cohort, y, change = world.cohort(round), {}, {}
        for i in cohort:
            data = world.data(round, i)
            y[i] = world.sgd(x, data, extra=lambda n, p, own_c=own[i], c=c: c[n] - own_c[n])
            new = {n: own[i][n] - c[n] + (x[n] - y[i][n]) / (len(data) * world.lr) for n in weights}
            change[i] = {n: new[n] - own[i][n] for n in weights}
            own[i] = new
        mean_y = world.mean([y[i] for i in cohort], cohort)
        x = {n: t if is_statistic(n) else x[n] + server_lr * (t - x[n]) for n, t in mean_y.items()}
        c = {n: c[n] + sum(change[i][n] for i in cohort) / clients for n in weights}
        both = {**x, **{f"c/{n}": t for n, t in c.items()}}
        yield Held(both, [dict(one) for one in own], [x], both)


# A whole model for each client.


def standalone(world: World) -> Reference:
    v = world.start_each()
    for round in count():
        for m in world.cohort(round):
            v[m] = world.sgd(v[m], world.data(round, m))
        yield Held({}, list(v), list(v))


def mtl(world: World, lam: float = 1.0) -> Reference:
    average, v = world.start(), world.start_each()
    for round in count():
        cohort = world.cohort(round)
        for m in cohort:
            v[m] = world.pulled(v[m], world.data(round, m), lam, average)
        average = world.mean([v[m] for m in cohort], cohort)
        yield Held(average, list(v), list(v))


def ditto(
    world: World,
    lam: float = 1.0,
    personal_epochs: int = 0,
    personal_lr: float = 0.0,
    part: Rule = of_all,
    distils: bool = False,
) -> Reference:
    """Ditto; PerAda where the part is the adapter set."""
    w, v = some(world.start(), part), world.start_each(part)
    for round in count():
        cohort, uploads = world.cohort(round), []
        for m in cohort:
            long, short = world.data(round, m, personal_epochs), world.data(round, m)
            v[m] = some(world.pulled(v[m], long, lam, w, part, personal_lr), part)
            uploads.append(some(world.sgd(w, short, part), part))
        w = world.mean(uploads, cohort)
        if distils:
            w = world.distilled(round, w, uploads, part)
        yield Held(w, list(v), list(v), w if part is of_adapter_set else {})


def pfedme(
    world: World,
    lam: float = 1.0,
    inner_steps: int = 3,
    eta: float = 0.5,
    beta: float = 1.0,
    personal_lr: float = 0.0,
) -> Reference:
    w, personal = world.start(), world.start_each()
    for round in count():
        cohort, uploads = world.cohort(round), []
        for m in cohort:
            local = dict(w)
            for batch in world.data(round, m):
                theta = world.pulled(local, [batch] * inner_steps, lam, local, lr=personal_lr)
                local = {n: theta[n] if is_statistic(n) else t - eta * lam * (t - theta[n]) for n, t in local.items()}
            personal[m] = theta
            uploads.append(local)
        average = world.mean(uploads, cohort)
        w = {n: t if is_statistic(n) else (1 - beta) * w[n] + beta * t for n, t in average.items()}
        yield Held(w, list(personal), list(personal), w)


def apfl(world: World, alpha: float = 0.5, adaptive: bool = False) -> Reference:
    w, v = world.start(), world.start_each()
    local, share = world.start_each(), [alpha for _ in world.clients]
    for round in count():
        cohort = world.cohort(round)
        for m in cohort:
            local[m] = dict(w)
            start = mixed(share[m], v[m], 1 - share[m], w)
            v[m] = {n: start[n] if is_statistic(n) else t for n, t in v[m].items()}
            for batch in world.data(round, m):
                local[m], v[m], share[m] = apfl_step(world, batch, local[m], v[m], share[m], adaptive)
        w = world.mean([local[m] for m in cohort], cohort)
        kept, personal = [], []
        for own, near, a in zip(v, local, share, strict=True):
            alone = {"own/alpha": torch.tensor([a], dtype=torch.float64)}
            kept.append({**{f"v/{n}": t for n, t in own.items()}, **{f"w/{n}": t for n, t in near.items()}, **alone})
            mixture = mixed(a, own, 1 - a, near)
            personal.append({n: own[n] if is_statistic(n) else t for n, t in mixture.items()})
        yield Held(w, kept, personal)


def apfl_step(
    world: World, batch: tuple[Tensor, Tensor], w: Values, v: Values, a: float, adaptive: bool
) -> tuple[Values, Values, float]:
    mixture = mixed(a, v, 1 - a, w)
    seen = loaded(world.net, {n: v[n] if is_statistic(n) else t for n, t in mixture.items()})
    names = [n for n, _ in seen.named_parameters()]
    grads = world.gradient(seen, batch, names)
    new_w = world.sgd(w, [batch])
    new_v = {n: v[n] - world.lr * a * grads[n] if n in grads else t for n, t in values_of(seen).items()}
    if adaptive:
        a = a - world.lr * sum(float(((v[n] - w[n]) * grads[n]).sum()) for n in names)
        a = min(max(a, 0.0), 1.0)
    return new_w, new_v, a


# A part for each client, the rest for all.


def together(world: World, own: Rule) -> Reference:
    """FedSim; FedBN and LG-FedAvg, which train all at once too."""
    u, v = some(world.start(), rest(own)), world.start_each(own)
    for round in count():
        cohort, uploads = world.cohort(round), []
        for m in cohort:
            found = world.sgd({**u, **v[m]}, world.data(round, m))
            v[m] = some(found, own)
            uploads.append(some(found, rest(own)))
        u = world.mean(uploads, cohort)
        yield Held(u, list(v), [{**u, **one} for one in v])


def in_turn(
    world: World, own: Rule, personal_epochs: int = 0, personal_lr: float = 0.0, shared_epochs: int = 0
) -> Reference:
    """FedAlt, and FedRep: the personal part on the round's batches, then the rest on the same batches."""
    u, v = some(world.start(), rest(own)), world.start_each(own)
    for round in count():
        cohort, uploads = world.cohort(round), []
        for m in cohort:
            found = world.sgd({**u, **v[m]}, world.data(round, m, personal_epochs), own, personal_lr)
            found = world.sgd(found, world.data(round, m, shared_epochs), rest(own))
            v[m] = some(found, own)
            uploads.append(some(found, rest(own)))
        u = world.mean(uploads, cohort)
        yield Held(u, list(v), [{**u, **one} for one in v])
