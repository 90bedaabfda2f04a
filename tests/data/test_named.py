"""Data sets and public images of other packages: `package.module:function` and entry points."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import flags

from perada.cli import main as cli
from perada.config import resolve
from perada.data import DataOptions, Federation, public_images
from perada.errors import InputError

PROGRAM = '''
import numpy as np
from perada.data import Source

RNG = np.random.default_rng(0)
seen = []

def blobs(options):
    """60 images of two classes at two sites."""
    seen.append(options)
    y = np.arange(60) % 2
    x = (RNG.integers(0, 60, (60, 1, 8, 8)) + 150 * y[:, None, None, None]).astype(np.uint8)
    return Source("blobs", x, y, ("dark", "bright"), test=np.arange(60) >= 50, site=np.array(["a", "b"])[y])

def pictures(options):
    return RNG.integers(0, 256, (20, options.size, options.size, 3), np.uint8)

def number(options):
    return 7

def floats(options):
    return Source("floats", np.zeros((4, 1, 8, 8)), np.zeros(4, int), ("a",))

def short(options):
    return Source("short", np.zeros((4, 1, 8, 8), np.uint8), np.zeros(3, int), ("a",))

thing = 3

def fails(options):
    raise KeyError("lost")
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of somebody else, with an entry point."""
    (tmp_path / "site" / "others").mkdir(parents=True)
    (tmp_path / "site" / "others" / "__init__.py").write_text("")
    (tmp_path / "site" / "others" / "sets.py").write_text(PROGRAM)
    (tmp_path / "site" / "others" / "broken.py").write_text("import no_such_module\n")
    about = tmp_path / "site" / "others-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[perada.datasets]\nother-blobs = others.sets:blobs\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "others"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["others.sets:blobs", "other-blobs"])
def test_a_function_of_another_package_is_a_data_set(name: str) -> None:
    f = Federation.named(name, partition="site", size=9)
    assert (f.name, f.classes, [c.name for c in f.clients]) == ("blobs", ("dark", "bright"), ["a", "b"])
    assert [len(c.test) for c in f.clients] == [5, 5]
    assert sys.modules["others.sets"].seen[-1] == DataOptions(name=name, partition="site", size=9)


def test_it_trains_and_is_loaded_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = flags(train__rounds=1, distill__data="others.sets:pictures", distill__steps=2)
    words += ["--set", "data.name=other-blobs", "--set", "data.clients=2"]
    assert cli.main(["train", "digits", *words, "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["local_test"]["per_client"]) == {"client-00", "client-01"}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("other-blob", "unknown data set 'other-blob': did you mean 'other-blobs'?"),
        ("nowhere.sets:blobs", "data set 'nowhere.sets:blobs': no module 'nowhere': install it"),
        ("others.broken:blobs", "importing others.broken fails: ModuleNotFoundError: No module named 'no_such_module'"),
        ("others.sets:blob", "data set 'others.sets:blob': module 'others.sets' has no 'blob'"),
        ("others.sets:thing", "data set 'others.sets:thing' is of type int, which cannot be called"),
        ("others.sets:fails", "data set 'others.sets:fails' cannot be made: KeyError: 'lost'"),
        ("others sets:blobs", "data set 'others sets:blobs' is not a name and not package.module:callable"),
        ("others.sets:number", "must return a perada.data.Source, not int"),
        ("others.sets:floats", "uint8 images [n, 1 or 3, H, W] and n targets, not float64 [4, 1, 8, 8]"),
        ("others.sets:short", "not uint8 [4, 1, 8, 8] and 3"),
    ],
)
def test_what_is_no_data_set_is_one_line(name: str, says: str) -> None:
    with pytest.raises(InputError) as error:
        Federation.named(name)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_public_images_of_another_package() -> None:
    found = public_images("others.sets:pictures", 8)
    assert found is not None
    assert tuple(found.shape) == (20, 3, 8, 8)
    found = public_images("other-blobs", 8)
    assert found is not None
    assert len(found) == 50, "of a data set, the training images"
    larger = public_images("other-blobs", 16)
    assert larger is not None
    assert larger.shape[2:] == (16, 16)
    with pytest.raises(InputError, match=r"public data 'others\.sets:number': images of type int64"):
        public_images("others.sets:number", 8)
    with pytest.raises(InputError, match=r"public data 'others\.sets:blob': module 'others\.sets' has no 'blob'"):
        public_images("others.sets:blob", 8)


def test_a_name_stays_a_name_in_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("others.sets:pictures", "other-blobs", "validation"):
        assert resolve("digits", {"distill.data": name}).distill.data == name
    assert resolve("digits", {"distill.data": "pictures"}).distill.data == str(tmp_path / "pictures")


def test_public_images_are_counted_and_writable() -> None:
    found = public_images("others.sets:pictures", 8)
    assert found is not None
    found[0] = 0
    assert np.array_equal(found[0].numpy(), np.zeros((3, 8, 8)))
