"""The pages in a real browser: they work at any width, in light and dark, and ask for nothing."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from small import plain

import perada
from perada.report import write_report
from perada.report.site import SitePage
from tools.browser import browser as installed

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PAGES = ("comparison", "theory and sites", "several labels", "site")
OPEN = "document.querySelectorAll('details').forEach(one => one.open = true)"
WIDER = """[document.documentElement.scrollWidth - innerWidth,
  ...Array.from(document.querySelectorAll('main *:not(.scroll *):not(.tall *):not(pre *)'),
    one => one.getBoundingClientRect().right - innerWidth)]"""
LIGHTNESS = """(() => { const found = getComputedStyle(document.body);
  const sum = colour => colour.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0);
  return [sum(found.backgroundColor), sum(found.color)]; })()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two methods, two seeds; one of them with theory and sites; a run on data with several labels; a site's page."""
    home = tmp_path_factory.mktemp("pages")
    sizes = {"data.clients": 3, "data.server_val": 0.7, "data.test": 0.1}
    settings = plain({**sizes, "run.shifts": True, "run.severities": [1, 5]})
    made = perada.compare("digits", methods=["perada", "standalone"], seeds=2, set=settings, out=home / "both", jobs=1)
    runs = [perada.load(made.path / name) for name in ("perada-0", "standalone-0")]
    write_report(runs, home / "sites.html", theory=True, sites=True)
    write_report([_labelled(home / "labels")], home / "labels.html", sites=True)
    _site(runs[0]).write(home / "site.html")
    files = (made.path / "report.html", home / "sites.html", home / "labels.html", home / "site.html")
    return dict(zip(PAGES, files, strict=True))


def _labelled(path: Path) -> perada.Run:
    """Trains two rounds on bright and dark halves of images: two labels."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, (120, 2)).astype(np.float32)
    halves = (labels.repeat(4, 1)[:, None, :] * 20).astype(np.uint8)
    images = draw.integers(0, 180, (120, 8, 8), dtype=np.uint8) + halves
    sites = {name: (images[k::2], labels[k::2]) for k, name in enumerate(("north", "south"))}
    data = perada.Federation.from_arrays(sites, classes=("left", "right"), val=0.3, test=0.3, size=8)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
    train = perada.Train(rounds=2, epochs=2, batch=8, lr=0.05)
    return perada.Experiment(net, data, perada.methods.FedAvg(), adapter=None, head="1", train=train).run(path)


def _site(run: perada.Run) -> SitePage:
    data, experiment = run.federation, run.experiment
    notes = [{"round": r, "loss": 1.0 / r, "local_test": 50.0 + r, "local_val": 55.0 + r} for r in (1, 2)]
    own = experiment.personal().map(lambda t: t[:1])
    return SitePage("north", "digits", run.config, data, experiment.model, own, experiment.global_model, notes)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=installed(), args=FLAGS)
        yield opened
        opened.close()


def opened(chromium: Browser, path: Path, width: int, scheme: Any) -> tuple[Page, list[str]]:
    """Returns an open page of a browser without a network, and what goes wrong in it from now on."""
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page, wrong = context.new_page(), list[str]()
    page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    return page, [url for url in wrong if not url.startswith("data:image/png")]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_works_in_a_browser(name: str, pages: dict[str, Path], chromium: Browser) -> None:
    """At both widths, light and dark: nothing goes wrong, nothing is wider than the screen, and no figure is blank."""
    lightness = {}
    assert pages[name].stat().st_size < 3e6
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            page, wrong = opened(chromium, pages[name], width, scheme)
            lightness[scheme] = page.evaluate(LIGHTNESS)
            page.evaluate(OPEN)
            assert max(page.evaluate(WIDER)) <= 1, (width, scheme)
            if width == 1280:
                assert_no_figure_is_blank(page)
            assert wrong == [], (width, scheme)
            page.context.close()
    (light_paper, light_ink), (dark_paper, dark_ink) = lightness["light"], lightness["dark"]
    assert light_paper > 600 > 300 > light_ink
    assert dark_ink > 600 > 300 > dark_paper


def assert_no_figure_is_blank(page: Page) -> None:
    """Every picture has an alternative text, and more than a few dots of other colours than its background's."""
    figures = page.locator("svg:not(.key), img").all()
    assert figures
    for figure in figures:
        assert figure.get_attribute("aria-label") or figure.get_attribute("alt")
        dots = np.asarray(Image.open(io.BytesIO(figure.screenshot())).convert("L"))
        assert (dots != np.bincount(dots.ravel()).argmax()).sum() > 50, figure.get_attribute("aria-label")


def column(page: Page, table: Any, number: int) -> list[str]:
    return [row.locator("th, td").nth(number).inner_text() for row in table.locator("tbody tr").all()]


def test_columns_sort_by_mouse_and_by_keyboard(pages: dict[str, Path], chromium: Browser) -> None:
    page, wrong = opened(chromium, pages["comparison"], 1280, "light")
    table = page.locator("table.sorts").first
    headers = table.locator("thead th")
    at = headers.all_inner_texts().index("Trained")
    headers.nth(at).get_by_role("button").click()
    assert column(page, table, at) == ["78,042", "24,660"]
    assert headers.nth(at).get_attribute("aria-sort") == "descending"
    headers.nth(at).get_by_role("button").press("Enter")
    assert column(page, table, at) == ["24,660", "78,042"]
    assert headers.nth(at).get_attribute("aria-sort") == "ascending"
    headers.nth(0).get_by_role("button").press("Space")
    assert column(page, table, 0) == ["perada", "standalone"]
    assert headers.nth(at).get_attribute("aria-sort") is None
    bytes_up = page.get_by_role("table", name="Communicated bytes and distillation")
    bytes_up.locator("thead th").nth(1).get_by_role("button").click()
    assert column(page, bytes_up, 1)[-2:] == ["0 B", "0 B"]
    assert wrong == []
    page.context.close()


def test_numbers_with_units_and_without_values_sort(pages: dict[str, Path], chromium: Browser) -> None:
    page, _ = opened(chromium, pages["comparison"], 1280, "light")
    order = page.evaluate(
        """() => { const body = document.querySelector('table.sorts tbody');
        const texts = ['n/a', '12 kB', '1.2M', '950', '−3.1', '24,660', '2.5e-3'];
        body.replaceChildren(...texts.map(text => { const row = document.createElement('tr');
          row.append(document.createElement('td')); row.cells[0].textContent = text; return row; }));
        document.querySelector('table.sorts th button').click();
        return Array.from(body.rows, row => row.cells[0].textContent); }"""
    )
    assert order == ["1.2M", "24,660", "12 kB", "950", "2.5e-3", "−3.1", "n/a"]
    page.context.close()


def test_a_page_prints(pages: dict[str, Path], chromium: Browser) -> None:
    page, wrong = opened(chromium, pages["comparison"], 800, "dark")
    page.emulate_media(media="print")
    paper, ink = page.evaluate(LIGHTNESS)
    assert paper == 3 * 255
    assert ink == 0
    assert page.pdf().startswith(b"%PDF")
    assert wrong == []
    page.context.close()
