"""Backbones by name: ours, torchvision's, timm's, other packages', and a line for each wrong name."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_same_tensors, build_backbone
from torch import nn

from perada import plugins
from perada.cli import main as cli
from perada.errors import InputError
from perada.methods import REGISTRY, method_sizes
from perada.models import Backbone, backbone, count_groups, known
from perada.models.resnet import resnet

NETS = """
import torch
from torch import nn
from perada.models import Backbone

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.classifier = nn.Linear(4, classes)
        self.spare = nn.Linear(4, 4)

    def forward(self, x):
        return self.classifier(self.body(x).mean((2, 3)))

class Named(Net):
    head = "classifier"

def described(classes):
    return Backbone(Net(classes), "classifier", size=48, mean=(0.5,), std=(0.2,))

def by_attribute(classes):
    return Net(classes)
by_attribute.head = "classifier"

def no_module(classes):
    return 3

def no_head(classes):
    return nn.Conv2d(3, classes, 1)

def wrong_head(classes):
    return Backbone(Net(classes), "clasifier")

def other_classes(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3, 7))

def breaks(classes):
    raise ValueError("two\\nlines")

def conv_head(classes):
    return Backbone(nn.Sequential(nn.Conv2d(3, classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), "0")

def dense(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 8), nn.ReLU(), nn.Linear(8, classes))

a_number = 5
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the current folder."""
    (tmp_path / "own_nets.py").write_text(NETS)
    (tmp_path / "broken_nets.py").write_text("import own_nets\nraise NameError('x')\n")
    (tmp_path / "needy_nets.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("own_nets", "broken_nets", "needy_nets"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "own_nets"


@pytest.mark.parametrize("name", ["Named", "by_attribute", "described"])
def test_a_callable_says_which_layer_is_its_head(name: str, nets: str) -> None:
    made = backbone(f"{nets}:{name}", 5)
    assert made.head == "classifier"
    assert made.name == f"{nets}:{name}"
    assert made.net(torch.zeros(2, 3, 8, 8)).shape == (2, 5)


def test_the_last_linear_layer_is_the_head_by_default(nets: str) -> None:
    with pytest.raises(InputError, match="'own_nets:Net' has 4 outputs for 5 classes"):
        backbone(f"{nets}:Net", 5)  # `spare` comes last
    assert backbone(f"{nets}:Net", 5, head="classifier").head == "classifier"
    assert backbone(f"{nets}:dense", 5).head == "3"


def test_what_a_backbone_says_about_its_images(nets: str) -> None:
    made = backbone(f"{nets}:described", 5)
    assert (made.size, made.mean, made.std) == (48, (0.5,), (0.2,))
    ours = backbone("resnet8", 5)
    assert (ours.head, ours.size, ours.mean, ours.std) == ("fc", None, None, None)


def test_a_head_may_be_any_layer_with_parameters(nets: str) -> None:
    made = backbone(f"{nets}:conv_head", 5)
    made.check((3, 8, 8), 5)
    assert made.head == "0"


def test_a_callables_first_weights_depend_on_the_seed_alone(nets: str) -> None:
    torch.manual_seed(1)
    a = backbone(f"{nets}:Named", 5, seed=3).net.state_dict()
    before = torch.get_rng_state()
    assert_same_tensors(a, backbone(f"{nets}:Named", 5, seed=3).net.state_dict())
    assert torch.equal(before, torch.get_rng_state()), "the global generator is left alone"
    assert not torch.equal(a["classifier.weight"], backbone(f"{nets}:Named", 5, seed=4).net.classifier.weight)


def test_weights_from_a_file_for_a_callable(nets: str, tmp_path: Path) -> None:
    given = backbone(f"{nets}:Named", 7, seed=9).net.state_dict()
    torch.save(given, tmp_path / "w.pth")
    net, report = build_backbone(f"{nets}:Named", 5, str(tmp_path / "w.pth"), 0)
    assert torch.equal(net.body[0].weight, given["body.0.weight"])
    assert report is not None
    assert report.head.startswith("new"), "the head of 7 classes does not fit"
    with pytest.raises(InputError, match="no embedded weights for 'own_nets:Named'"):
        build_backbone(f"{nets}:Named", 5, "embedded", 0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nest:Net", "backbone 'own_nest:Net': no module 'own_nest'"),
        ("own_nets.deep:Net", "backbone 'own_nets.deep:Net': "),
        ("own_nets:Nett", "module 'own_nets' has no 'Nett'"),
        ("own_nets:a_number", "is of type int, which cannot be called"),
        ("own_nets:no_module", "'own_nets:no_module': a backbone must be a torch.nn.Module, not int"),
        ("own_nets:no_head", "'own_nets:no_head': this network has no linear layer that could be its head"),
        ("own_nets:wrong_head", "this network has no layer 'clasifier' that could be its head"),
        ("own_nets:other_classes", "has 7 outputs for 5 classes"),
        ("own_nets:breaks", "cannot be made: ValueError: two$"),
        ("own_nets:Net.forward", "is not a name and not package.module:callable"),
        ("broken_nets:Net", "importing broken_nets fails: NameError: x"),
        ("needy_nets:Net", "importing needy_nets fails: ModuleNotFoundError: No module named 'no_such_package'"),
        ("a:b:c", "is not a name and not package.module:callable"),
        (":Net", "is not a name and not package.module:callable"),
        ("torchvision:", "is not a name and not package.module:callable"),
        ("resnet19", "unknown backbone 'resnet19': did you mean 'resnet18'"),
        ("", "unknown backbone ''"),
    ],
)
def test_a_wrong_name_is_one_line(name: str, message: str, nets: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        backbone(name, 5)
    assert "\n" not in str(caught.value)


def test_known_names_are_checked_without_an_import(nets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "import_module", None)
    for name in ("resnet50", "torchvision:resnet18", "timm:hf_hub/x", "anything.at_all:callable"):
        known(name)
    for name in ("resnet51", "a:b:c", "timm:"):
        with pytest.raises(InputError, match=f"backbone '{name}'"):
            known(name)


def test_an_entry_point_of_another_package(nets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("their-net", "own_nets:Named", "perada.backbones")

    def points(group: str, **by: str) -> list[EntryPoint]:
        return [p for p in [point] if p.group == group and by.get("name", p.name) == p.name]

    monkeypatch.setattr(plugins, "entry_points", points)
    assert backbone("their-net", 5).head == "classifier"
    with pytest.raises(InputError, match="did you mean 'their-net'"):
        known("their-nett")


def test_the_images_are_tried_before_a_training(nets: str) -> None:
    made = backbone(f"{nets}:dense", 5)
    made.net.train()
    made.check((3, 8, 8), 5)
    assert made.net.training, "its mode is given back"
    with pytest.raises(InputError, match=r"cannot take images of 3×9×9: RuntimeError: .*shapes"):
        made.check((3, 9, 9), 5)
    with pytest.raises(InputError, match=r"must give logits \[2, 6\] for two images, not \[2, 5\]"):
        made.check((3, 8, 8), 6)


def test_a_network_without_convolutions_has_sizes_for_methods_without_adapters(nets: str) -> None:
    name = f"{nets}:dense"
    sizes = count_groups(name, 5)
    full = 192 * 8 + 8 + 8 * 5 + 5
    assert sizes["full"]["parameters"] == sizes["everything"]["parameters"] == full
    assert sizes["adapter_modules"] == {"parameters": 0, "buffers": 0}
    assert method_sizes("ditto", name, 5)["trained"] == 2 * full
    with pytest.raises(InputError, match="no convolution of this network takes an adapter"):
        method_sizes("perada", name, 5)
    with pytest.raises(InputError, match="no parameter group 'input'"):
        method_sizes("fedalt-input", name, 5)


def test_params_and_methods_of_an_own_network(nets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["params", f"{nets}:Named", "--classes", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["full"] == (3 * 4 * 9 + 4) + (4 * 5 + 5) + (4 * 4 + 4)
    assert found["output"] == 4 * 5 + 5
    assert cli.main(["methods", "--backbone", f"{nets}:Named", "--classes", "5", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(out)}
    assert rows["fedavg"]["communicated"] == found["full"]
    assert rows["perada"]["communicated"] == found["adapter"]
    assert {"fedalt-input", "fedsim-input"} == REGISTRY.keys() - rows.keys()
    assert "fedalt-input cannot train own_nets:Named" in err
    assert cli.main(["params", f"{nets}:Nott"]) == 2
    assert "has no 'Nott'" in capsys.readouterr().err


# torchvision and timm: stand-ins with the functions that are called, since neither is installed for the tests.


class Images:
    crop_size, mean, std = [232], [0.4, 0.5, 0.6], [0.1, 0.2, 0.3]


def pretrained(classes: int = 1000) -> nn.Module:
    net = resnet("resnet18", classes)
    with torch.no_grad():
        net.conv1.weight.fill_(0.25)
    return net


@pytest.fixture
def torchvision(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    asked: list[Any] = []
    models: Any = ModuleType("torchvision.models")

    def get_model(name: str, weights: str | None = None, **how: int) -> nn.Module:
        asked.append((name, weights, how))
        return pretrained() if weights else resnet("resnet18", how["num_classes"])

    models.list_models = lambda module: ["resnet18", "wide_resnet50_2"] if module is models else ["fasterrcnn"]
    models.get_model = get_model
    models.get_model_weights = lambda name: SimpleNamespace(DEFAULT=SimpleNamespace(transforms=Images))
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    return asked


def test_a_network_of_torchvision(torchvision: list[Any]) -> None:
    made = backbone("torchvision:resnet18", 5)
    assert (made.head, made.size, made.mean, made.std) == ("fc", 232, (0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    assert torchvision == [("resnet18", None, {"num_classes": 5})]
    report = made.load("torchvision")
    assert torchvision[1:] == [("resnet18", "DEFAULT", {})]
    assert report is not None
    assert report.head == "new (the file's is for other classes)"
    assert bool((made.net.conv1.weight == 0.25).all())
    assert made.net.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    for name in ("resnet19", "fasterrcnn"):
        with pytest.raises(InputError, match=f"torchvision has no model '{name}' for classification"):
            backbone(f"torchvision:{name}", 5)


def test_our_names_take_torchvisions_weights(torchvision: list[Any]) -> None:
    net, _ = build_backbone("resnet18", 10, "torchvision", 0)
    assert bool((net.conv1.weight == 0.25).all())
    with pytest.raises(InputError, match="torchvision has no weights for 'resnet8'"):
        build_backbone("resnet8", 10, "torchvision", 0)


class TimmNet(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.pretrained_cfg = {"input_size": (3, 160, 160), "mean": (0.5, 0.5, 0.5), "std": (0.3, 0.3, 0.3)}
        self.conv_stem = nn.Conv2d(3, 4, 3)
        self.logits, self.aux = nn.Linear(4, classes), nn.Linear(4, 2)

    def get_classifier(self) -> nn.Module:
        return self.logits

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(self.conv_stem(x).mean((2, 3)))


def test_a_network_of_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    timm: Any = ModuleType("timm")
    timm.is_model = lambda name: name == "small"
    timm.list_models = lambda: ["small"]
    timm.create_model = lambda name, pretrained, num_classes=1000: TimmNet(num_classes)
    monkeypatch.setitem(sys.modules, "timm", timm)
    made = backbone("timm:small", 5)
    assert (made.head, made.size, made.mean) == ("logits", 160, (0.5, 0.5, 0.5))
    report = made.load("timm")
    assert report is not None
    assert (report.head, report.missing) == ("new (the file's is for other classes)", ())
    with pytest.raises(InputError, match="timm has no model 'smal' for classification: did you mean 'small'"):
        backbone("timm:smal", 5)


def absent(name: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Finder:
        @staticmethod
        def find_spec(asked: str, *_: object) -> None:
            if asked.partition(".")[0] == name:
                raise error

    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delitem(sys.modules, f"{name}.models", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


@pytest.mark.parametrize("package", ["torchvision", "timm"])
@pytest.mark.parametrize(
    "error", [ImportError("No module"), RuntimeError("operator torchvision::nms does not exist\nmore")], ids=repr
)
def test_a_package_that_cannot_be_imported(package: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(package, error, monkeypatch)
    for make in (lambda: backbone(f"{package}:resnet18", 5), lambda: build_backbone("resnet18", 5, package, 0)):
        with pytest.raises(InputError, match=f"{package} cannot be imported .*: pip install") as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_download_that_fails(torchvision: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def get_model(name: str, weights: str) -> nn.Module:
        raise OSError("no route to host")

    monkeypatch.setattr(sys.modules["torchvision.models"], "get_model", get_model)
    with pytest.raises(InputError, match="of 'resnet18' cannot be loaded: no route to host"):
        build_backbone("resnet18", 5, "torchvision", 0)


def test_a_backbone_object_is_checked() -> None:
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module, not 'resnet18'"):
        Backbone("resnet18")  # type: ignore[arg-type]
    assert Backbone(resnet("resnet8", 4)).head == "fc"


def test_sizes_of_a_name_are_computed_once() -> None:
    assert count_groups("resnet8", 4) is count_groups("resnet8", 4)
