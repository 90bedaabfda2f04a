"""A Flower grid inside this process: messages go through Flower's own serialisation and the real ClientApp."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity
from safetensors import SafetensorError
from safetensors.torch import load, save
from small import SMALL

from perada.config import Config, toml_value
from perada.data.digits import digits
from perada.flower import app
from perada.flower.client import Site
from perada.flower.messages import FORMAT, STATE, read_request
from perada.flower.settings import ServerSettings

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # what Flower's own processes set

SITES = ("east", "north", "west")

HERE: dict[str, Any] = {k: v for k, v in SMALL.items() if not k.startswith("data.")}  # the data are the sites'
HERE |= {"data.size": 8, "data.val": 0.2, "data.test": 0.2, "train.rounds": 3, "run.lanes": 1, "run.device": "cpu"}


@dataclass
class World:
    """A folder with the data and settings of three hospitals and a server."""

    home: Path
    settings: ServerSettings

    @property
    def simulated(self) -> Config:
        """The same run for the simulator, which holds everybody's data."""
        data = replace(self.settings.config.data, root=str(self.home / "all.npz"))
        return replace(self.settings.config, data=data)

    def site(self, name: str) -> Site:
        return app._site(str(self.home / name / "site.toml"))

    def trained(self) -> dict[str, int]:
        return {name: self.site(name).trained for name in SITES}


def make_world(home: Path, limits: Mapping[str, Any] | None = None, **set: Any) -> World:
    """Three sites with some of the digits each, of different sizes and classes."""
    data = digits()
    images, labels, held = data.images[:, 0], data.targets, {}
    for name, size, classes, seed in (
        ("east", 36, range(6), 1),
        ("north", 30, range(3, 10), 2),
        ("west", 44, range(10), 3),
    ):
        pool = np.flatnonzero(np.isin(labels, list(classes)))
        held[name] = np.sort(np.random.default_rng(seed).permutation(pool)[:size])
    names = np.array(data.classes)
    home.mkdir(parents=True, exist_ok=True)
    for name, at in held.items():
        (home / name).mkdir(exist_ok=True)
        np.savez(home / name / "data.npz", images=images[at], labels=labels[at], classes=names)
        (home / name / "site.toml").write_text(
            f'[site]\nfederation = "digits"\nname = "{name}"\ndata = "data.npz"\ndevice = "cpu"\nscore_digits = 15\n'
        )
    order = np.concatenate([held[n] for n in SITES])
    owner = np.repeat(SITES, [len(held[n]) for n in SITES])
    np.savez(home / "all.npz", images=images[order], labels=labels[order], classes=names, site=owner)
    settings = write_server(home, limits, **set)
    return World(home, settings)


def write_server(home: Path, limits: Mapping[str, Any] | None = None, **set: Any) -> ServerSettings:
    rounds = {"min_sites": 1, "deadline_s": 20.0, "hello_s": 5.0, "poll_s": 0.001, "retries": 0, **(limits or {})}
    lines = ['preset = "digits"', "[federation]", 'name = "digits"', f"sites = {toml_value(SITES)}"]
    lines += [f"classes = {toml_value([str(d) for d in range(10)])}", "channels = 1", "[rounds]"]
    lines += [f"{k} = {toml_value(v)}" for k, v in rounds.items()]
    given = {**HERE, **{k.replace("__", "."): v for k, v in set.items()}}
    for section in dict.fromkeys(k.partition(".")[0] for k in given):
        lines.append(f"[{section}]")
        lines += [f"{k.partition('.')[2]} = {toml_value(v)}" for k, v in given.items() if k.startswith(f"{section}.")]
    (home / "server.toml").write_text("\n".join(lines) + "\n")
    return ServerSettings.read(home / "server.toml")


def opened(content: RecordDict) -> RecordDict:
    """Returns a message with its state as named arrays, for tests to look at and to change."""
    if "state" not in content:
        return content
    try:
        tensors = load(content["state"][STATE].data)
    except SafetensorError:  # a test made it so
        return content
    return RecordDict({**content, "state": ArrayRecord({n: Array(t.numpy()) for n, t in tensors.items()})})


def closed(content: RecordDict) -> RecordDict:
    """Reverses `opened`."""
    if "state" not in content or set(content["state"]) == {STATE}:
        return content
    return RecordDict({**content, "state": packed({n: a.numpy() for n, a in content["state"].items()})})


def packed(arrays: Mapping[str, np.ndarray]) -> ArrayRecord:
    return raw(save({n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}))


def raw(data: bytes) -> ArrayRecord:
    return ArrayRecord({STATE: Array("uint8", (len(data),), FORMAT, data)})


def through_flower(message: Message) -> tuple[Message, dict[str, bytes]]:
    """A message as it is after the wire, and the bytes of every object of it that crossed."""
    message.metadata.__dict__["_message_id"] = message.object_id
    contents = {key: bytes(one.deflate()) for key, one in get_all_nested_objects(message).items()}
    found = inflate_object_from_contents(message.object_id, dict(contents))
    assert isinstance(found, Message)
    found.metadata.__dict__["_message_id"] = message.object_id
    return found, contents


Meddle = Callable[[str, str, int, Message], Message | None]


@dataclass
class MemoryGrid(Grid):
    """Calls the ClientApp at once. `meddle(site, kind, round, reply)` may change or withhold a reply; what is withheld
    (None) can be let go later by putting it in `ready`."""

    world: World
    meddle: Meddle = lambda site, kind, round, reply: reply
    nodes: dict[int, str] = field(default_factory=lambda: {i + 1: name for i, name in enumerate(SITES)})
    ready: dict[str, Message] = field(default_factory=dict)
    log: list[tuple[str, str, str, int, RecordDict]] = field(default_factory=list)  # direction, site, kind, round
    bytes: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kw: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            received, contents = through_flower(message)
            ids.append(received.metadata.message_id)
            site = self.nodes[message.metadata.dst_node_id]
            about = read_request(received.content)
            self.log.append(("down", site, about.kind, about.round, opened(received.content)))
            self.bytes.append(("down", contents))
            file = str(self.world.home / site / "site.toml")
            context = Context(1, message.metadata.dst_node_id, {"site": file}, RecordDict(), {})
            reply = app.client_app(received, context)
            if reply.has_content():
                reply.content = opened(reply.content)
            meddled = self.meddle(site, about.kind, about.round, reply)
            if meddled is not None:
                if meddled.has_content():
                    meddled.content = closed(meddled.content)
                back, contents = through_flower(meddled)
                if back.has_content():
                    self.log.append(("up", site, about.kind, about.round, opened(back.content)))
                    self.bytes.append(("up", contents))
                self.ready[received.metadata.message_id] = back
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.ready.pop(i) for i in list(message_ids) if i in self.ready]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


def run(world: World, name: str = "run", meddle: Meddle | None = None, **kw: Any) -> tuple[Path, MemoryGrid]:
    """A whole run in this process; the run's folder and what crossed the wire."""
    grid = MemoryGrid(world, **({"meddle": meddle} if meddle else {}))
    path = app.serve(grid, world.settings, name, **kw)
    return path, grid
