"""The site builds without warnings, its notebooks run, and its pages show what they should."""

import io
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from PIL import Image, ImageStat

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(ROOT.glob("docs/tutorials/*.ipynb"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    built = tmp_path_factory.mktemp("site")
    options = ["--nitpicky", "--fail-on-warning", "--keep-going", "-q", "-d", built / "trees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ROOT / "docs", built / "html"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return built / "html"


class Links(HTMLParser):
    """What a page links to and loads, and the places in it that others can link to."""

    def __init__(self, path):
        super().__init__()
        self.targets, self.places, self.external = [], set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.places.add(attributes.get("id"))
        if tag == "a" and "href" in attributes:
            self.targets.append(attributes["href"])
        for key in ("src", "srcset", "href"):
            if tag in ("img", "script", "link", "iframe") and key in attributes:
                self.external += [attributes[key]] if re.match("https?:|//", attributes[key]) else []
                self.targets += [attributes[key]] if tag != "link" else []


def test_every_link_within_the_site_leads_to_a_page_and_a_place_in_it(site):
    pages = {path: Links(path) for path in site.rglob("*.html")}
    assert len(pages) > 20
    for path, page in pages.items():
        for target in page.targets:
            file, _, place = target.partition("#")
            if re.match(r"\w+:", target):
                continue
            linked = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            assert linked.exists(), f"{path.name}: {target}"
            assert not place or linked not in pages or unquote(place) in pages[linked].places, f"{path.name}: {target}"


def test_no_page_loads_anything_from_elsewhere(site):
    for path in site.rglob("*.html"):
        assert Links(path).external == [], path.name


def test_the_reference_has_every_public_name_and_every_command(site):
    import halve
    from halve.cli.app import COMMANDS

    api, commands = ((site / "reference" / name).read_text() for name in ("api.html", "commands.html"))
    shown = set(re.findall(r'id="halve\.(?:\w+\.)*(\w+)"', api))
    assert set(halve.__all__) - {"__version__"} <= shown
    assert set(re.findall(r"Usage: halve ([\w-]+)", commands)) == {*COMMANDS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore::halve.errors.EngineWarning")
def test_a_notebook_runs_and_prints_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    from run_notebook import run

    notebook = json.loads(path.read_text())
    assert [words(cell) for cell in run(notebook)["cells"]] == [words(cell) for cell in notebook["cells"]]


def words(cell):
    """What a cell printed, without its numbers: they differ a little between machines."""
    printed = ["".join(output.get("text", [])) for output in cell.get("outputs", [])]
    return [re.sub(r"\d+(\.\d+)?", "#", text) for text in printed]


def test_there_are_two_notebooks_and_both_have_outputs():
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert sum(bool(cell.get("outputs")) for cell in cells) > 3


@pytest.fixture(scope="module")
def page():
    """A page of a browser in which nothing is said and nothing is asked of the network."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        opened, said = browser.new_page(color_scheme="light"), []
        opened.on("console", lambda message: said.append(message.text))
        opened.on("pageerror", lambda error: said.append(str(error)))
        opened.on("request", lambda request: said.append(request.url) if request.url.startswith("http") else None)
        yield opened
        browser.close()
        assert said == []


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [360, 1600])
def test_pages_fit_the_screen_and_show_their_pictures(site, page, width):
    page.set_viewport_size({"width": width, "height": 800})
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == width, path.name
        missing = "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
        assert page.evaluate(missing) == [], path.name


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_pictures_follow_the_theme_that_is_chosen_on_the_page(site, page):
    page.set_viewport_size({"width": 1200, "height": 800})
    page.goto((site / "index.html").as_uri())
    brightness = {}
    for theme in ("light", "dark"):
        page.evaluate(f"document.body.dataset.theme = '{theme}'")
        picture = Image.open(io.BytesIO(page.locator("article img").first.screenshot())).convert("L")
        brightness[theme] = ImageStat.Stat(picture).mean[0]
    assert brightness["dark"] < 80
    assert brightness["light"] > 200
