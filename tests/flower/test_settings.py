"""server.toml, site.toml and the plan: every mistake is one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flower.wire import make_world
from perada.errors import InputError
from perada.flower.settings import Plan, ServerSettings, SiteSettings
from perada.flower.site_data import public_test, site_federation

SERVER = '[federation]\nname = "chest"\nsites = ["b", "a"]\nclasses = ["no", "yes"]\n'
SITE = '[site]\nfederation = "chest"\nname = "north"\ndata = "images"\n'


def server(tmp_path: Path, text: str) -> ServerSettings:
    (tmp_path / "server.toml").write_text(text)
    return ServerSettings.read(tmp_path / "server.toml")


def site(tmp_path: Path, text: str) -> SiteSettings:
    (tmp_path / "site.toml").write_text(text)
    return SiteSettings.read(tmp_path / "site.toml")


def test_sites_are_sorted_and_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    found = server(tmp_path, SERVER + '[model]\nweights = "w.pth"\n[distill]\ndata = "public"\n')
    assert found.federation.sites == ("a", "b")
    assert found.runs() == tmp_path / "state" / "runs"
    assert found.config.model.weights == str(tmp_path / "w.pth")
    assert found.config.distill.data == str(tmp_path / "public")
    here = site(tmp_path, SITE)
    assert (here.data, here.state) == (str(tmp_path / "images"), str(tmp_path / "state"))


def test_a_federation_clips_uploads_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert server(tmp_path, SERVER).config.train.aggregate == "norm_clip"
    assert server(tmp_path, SERVER + '[train]\naggregate = "mean"\n').config.train.aggregate == "mean"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = [", "not valid TOML"),
        ("", r"\[federation\] needs name"),
        ('[federation]\nname = "a/b"\nsites = ["a"]\nclasses = ["x", "y"]\n', "name must be letters"),
        ('[federation]\nname = "a"\nsites = ["a", "a"]\nclasses = ["x", "y"]\n', "site 'a' is named twice"),
        ('[federation]\nname = "a"\nsites = []\nclasses = ["x", "y"]\n', "at least one site"),
        ('[federation]\nname = "a"\nsites = ["../x"]\nclasses = ["x", "y"]\n', "site name must be letters"),
        ('[federation]\nname = "a"\nsites = ["a"]\nclasses = ["x"]\n', "at least two"),
        (SERVER + "channels = 2\n", "channels must be 1 or 3"),
        (SERVER + "[rounds]\nmin_site = 2\n", r"unknown key 'rounds\.min_site': did you mean 'rounds\.min_sites'"),
        (SERVER + "[rounds]\ndeadline_s = 0\n", "deadline_s must be above 0"),
        (SERVER + '[rounds]\ndeadline_s = "soon"\n', "deadline_s must be a number"),
        (SERVER + "[train]\ncohort = 3\n", r"Train\.cohort=3 but there are 2 sites"),
        (SERVER + '[model]\nweights = "fedavg"\n', "ModelOptions.weights=fedavg works in simulations only"),
        (SERVER + '[data]\nroot = "/x"\n', r"DataOptions\.root has no meaning at a server"),
        (SERVER + '[distill]\nguard = "server"\n', "needs labelled data at the server"),
        (SERVER + '[distill]\ndata = "validation"\n', "Distill.data=validation has no meaning at a server"),
        (SERVER + "[trian]\nlr = 1\n", "unknown section 'trian'"),
        ('preset = "chset"\n' + SERVER, "unknown preset 'chset'"),
    ],
)
def test_a_bad_server_toml_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(InputError, match=line) as error:
        server(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", r"\[site\] needs federation"),
        (SITE.replace("north", "../north"), "name must be letters"),
        (SITE + "colour = 1\n", "unknown key 'site.colour'"),
        (SITE + "[server]\n", "unknown section 'server'"),
        (SITE + 'device = "tpu"\n', r"site\.device must be one of"),
    ],
)
def test_a_bad_site_toml_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    with pytest.raises(InputError, match=line):
        site(tmp_path, text)
    with pytest.raises(InputError, match="no such file"):
        SiteSettings.read(tmp_path / "none.toml")


def test_a_plan_is_read_as_it_was_written_and_names_no_path_of_the_server(tmp_path: Path) -> None:
    found = server(tmp_path, SERVER + '[model]\nweights = "w.pth"\n[distill]\ndata = "public"\n[run]\ndevice = "cpu"\n')
    plan = Plan.of(found, "ab" * 32)
    assert Plan.parse(plan.text()) == plan
    assert str(tmp_path) not in plan.text()
    for text in ("", "[]", "{}", plan.text()[:-20], plan.text().replace('"channels": 3', '"channels": "3"')):
        with pytest.raises(InputError, match="plan cannot be read"):
            Plan.parse(text)


def test_labels_are_numbered_as_in_the_plan(tmp_path: Path) -> None:
    """A site without class 0 must not call its first class 0."""
    world = make_world(tmp_path)
    plan = Plan.of(world.settings, "")
    held = dict(np.load(tmp_path / "north" / "data.npz"))
    words = np.array([str(x) for x in held["labels"]])
    np.savez(tmp_path / "north" / "data.npz", images=held["images"], labels=words)  # its own classes: 3 to 9
    north = site_federation(world.site("north").settings, plan, torch.device("cpu"))
    assert north.classes == tuple("0123456789")
    assert sorted(set(north.targets.tolist())) == list(range(3, 10))
    assert [c.name for c in north.clients] == ["north"]
    assert public_test(str(tmp_path / "all.npz"), plan, torch.device("cpu")).test.size == 110


def test_data_of_several_sites_give_the_site_its_own(tmp_path: Path) -> None:
    world = make_world(tmp_path)
    plan = Plan.of(world.settings, "")
    alone = site_federation(world.site("west").settings, plan, torch.device("cpu"))
    from dataclasses import replace

    shared = replace(world.site("west").settings, data=str(tmp_path / "all.npz"))
    found = site_federation(shared, plan, torch.device("cpu"))
    assert found.images.equal(alone.images)
    assert (found.clients[0].train == alone.clients[0].train).all()
    with pytest.raises(InputError, match="no sample of site 'south': it has east, north, west"):
        site_federation(replace(shared, name="south"), plan, torch.device("cpu"))
    with pytest.raises(InputError, match=r"images are \(1, 8, 8\), the federation's \(3, 8, 8\)"):
        site_federation(shared, replace(plan, channels=3), torch.device("cpu"))
    with pytest.raises(InputError, match="class '9' is not one of the federation's"):
        site_federation(shared, replace(plan, classes=tuple("012345678")), torch.device("cpu"))
