"""One federation of real processes for all tests here; each leaves it running and behaving well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from network.federation import SITES, DemoProcess, Net
from perada.flower import app


@pytest.fixture(scope="session", autouse=True)
def demo_process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoProcess]:
    """The demo, from the first test on, where it is among those that were asked for."""
    process = DemoProcess(tmp_path_factory.mktemp("demo"))
    if any("demo_process" in getattr(item, "fixturenames", ()) for item in request.session.items):
        process.start()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    net = Net(tmp_path_factory.mktemp("net"))
    try:
        net.up()
        yield net
    except BaseException:
        for name in list(net.running):
            net.kill(name)
        raise
    net.close()


@pytest.fixture
def net(federation: Net) -> Iterator[Net]:
    federation.misbehave({})
    federation.up()
    app._site.cache_clear()  # what this process knows of the sites' folders is old
    yield federation
    federation.misbehave({})
    assert all(federation.running[name].poll() is None for name in ("server", *SITES)), "a process ended by itself"
