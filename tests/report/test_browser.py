"""The page in a real browser: Debian's Chromium, never a download."""

import itertools
import json
import shutil

import pytest

from tests.report.inputs import CLASSES, HOSTILE, log_lines, plan

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as player:
        started = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Opened:
    """A page, and everything that it said or asked for."""

    def __init__(self, page, path):
        self.page, self.said, self.asked = page, [], []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(path.as_uri())
        self.uri = path.as_uri()

    def cells(self, table, column):
        """The texts of a column of the table with this label."""
        return self.page.locator(f'[aria-label="{table}"] tbody tr > :nth-child({column})').all_inner_texts()

    def check(self):
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("data:")] == [self.uri]


@pytest.fixture
def opened(browser, full_page):
    """The page at the size of a desktop; whatever a test does, it stays quiet and asks for nothing."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    found = Opened(context.new_page(), full_page[1])
    yield found
    found.check()
    context.close()


def test_names_do_not_run(opened):
    assert opened.page.locator("h1").inner_text() == HOSTILE
    assert HOSTILE in opened.cells("Layers", 1)
    assert opened.page.locator("script").count() == 1 + opened.page.locator(".follow").count()
    assert opened.page.locator("dd.masked").first.inner_text() in CLASSES


def test_an_injected_script_would_not_run_either(opened):
    policy = opened.page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content")
    assert "default-src 'none'" in policy
    opened.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'bad = 1'; document.body.append(s) }"
    )
    assert opened.page.evaluate("window.bad") is None
    assert any("Content Security Policy" in text for text in opened.said)
    opened.said.clear()


def test_the_page_shows_the_numbers_of_its_sources(opened, everything):
    evaluation = json.loads(everything[1]["evaluation"].read_text())
    assert (
        f"{100 * evaluation['agreement']:.1f} % of predictions unchanged"
        in opened.page.locator(".verdict").inner_text()
    )
    shown = dict(zip(opened.cells("Layers", 1), opened.cells("Layers", 4), strict=True))
    for name, lost in evaluation["layers"].items():
        assert shown[name].strip() == f"{100 * lost['feature_error']:.1f} %"


def test_a_click_sorts_and_the_third_restores_the_order(opened):
    order = opened.cells("Layers", 1)
    button = opened.page.get_by_role("button", name="feature error")
    head = opened.page.locator("th", has=button)
    button.click()
    values = [float(cell.split()[0]) for cell in opened.cells("Layers", 4) if cell.strip() != "-"]
    assert values == sorted(values, reverse=True)
    assert head.get_attribute("aria-sort") == "descending"
    assert [cell.strip() for cell in opened.cells("Layers", 4)][-2:] == ["-", "-"]  # unknown values come last
    button.focus()
    opened.page.keyboard.press("Enter")  # by keyboard
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(cell.split()[0]) for cell in opened.cells("Layers", 4)[:3]] == sorted(values)
    assert opened.cells("Layers", 4)[-1].strip() == "-"
    button.click()
    assert opened.cells("Layers", 1) == order
    opened.page.get_by_role("region", name="Layers", exact=True).get_by_role("button", name="layer").click()
    assert opened.cells("Layers", 1) == sorted(order, key=str.lower)


def test_the_pointer_reads_the_curve(opened):
    chart = opened.page.locator(".chart").first
    box = chart.locator("svg.plot").bounding_box()
    opened.page.mouse.move(box["x"] + 1, box["y"] + 50)
    said = chart.locator(".say").inner_text()
    assert said == f"step 10, 1.5 s: loss {log_lines()[0]['loss']:.3f}, entropy 0.80, 1.0 % of blocks changed"
    cursor = chart.locator(".cursor").bounding_box()
    assert cursor["x"] + 1 == pytest.approx(box["x"], abs=1.5)
    opened.page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 50)
    assert chart.locator(".say").inner_text().startswith("step 60,")


def test_arrow_keys_read_the_strip_and_enter_goes_to_the_layer(opened):
    strip = opened.page.locator(".follow", has=opened.page.locator(".strip"))
    say = opened.page.locator("figure", has=opened.page.locator(".strip")).locator(".say")
    strip.focus()
    opened.page.keyboard.press("Home")
    assert say.inner_text().startswith("stem: not masked")
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("ArrowRight")
    assert say.inner_text() == f"{HOSTILE}: 2:4, 2,304 weights"
    opened.page.keyboard.press("Enter")
    assert opened.page.locator("tr.found th").inner_text() == HOSTILE


def test_the_dots_of_the_frontier_can_be_read(opened):
    chart = opened.page.locator("#comparison .follow")
    chart.focus()
    opened.page.keyboard.press("End")
    assert opened.page.locator("#comparison .say").inner_text() == f"dense: {plan().dense_ms:.3f} ms"


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_sticks_out_at_any_width(opened, width):
    opened.page.set_viewport_size({"width": width, "height": 800})
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    wide = """() => [...document.querySelectorAll('h1, h2, h3, p, section, .tile, figure, img, dl, .say, li')]
        .filter(e => { const r = e.getBoundingClientRect(); return r.left < 0 || r.right > innerWidth + 1 })
        .map(e => e.outerHTML.slice(0, 80))"""
    assert opened.page.evaluate(wide) == []
    small = "() => [...document.querySelectorAll('.tick')].filter(e => e.getBoundingClientRect().height < 9).length"
    assert opened.page.evaluate(small) == 0  # text does not shrink with a chart


def test_nothing_moves_while_the_page_is_read(opened):
    height = opened.page.evaluate("document.documentElement.scrollHeight")
    for figure in opened.page.locator(".follow").all():
        figure.hover()
        figure.press("Home")
    opened.page.get_by_role("button", name="weights").first.click()
    assert opened.page.evaluate("document.documentElement.scrollHeight") == height


CONTRAST = """() => {
    const parts = c => c.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
    const ground = e => { for (; e; e = e.parentElement) {
        const c = parts(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c } };
    return [...document.querySelectorAll('p, h1, h2, h3, td, th, small, .say, .key, dt, dd, a, summary, code')]
        .filter(e => e.innerText.trim())
        .map(e => { const a = light(parts(getComputedStyle(e).color)), b = light(ground(e));
            return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.outerHTML.slice(0, 60)] })
        .filter(([ratio]) => ratio < 4.5) }"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(opened, theme):
    opened.page.emulate_media(color_scheme=theme)
    assert opened.page.evaluate(CONTRAST) == []
    ground = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 600) == (theme == "light")


def test_print_is_dark_on_white_without_what_only_works_on_a_screen(opened):
    opened.page.emulate_media(media="print", color_scheme="dark")
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not opened.page.locator("nav").is_visible()
    assert opened.page.locator("svg.strip").is_visible()


def test_screen_readers_get_names_for_everything(opened):
    unnamed = """() => [...document.querySelectorAll('[role=img], [role=region], [role=group], table, img, section')]
        .filter(e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby') || e.getAttribute('alt') ||
            e.querySelector('caption')))
        .map(e => e.outerHTML.slice(0, 80))"""
    assert opened.page.evaluate(unnamed) == []
    levels = [int(one.evaluate("e => e.tagName[1]")) for one in opened.page.locator("h1, h2, h3").all()]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_page_is_complete_without_scripts(browser, full_page):
    context = browser.new_context(java_script_enabled=False, viewport={"width": 1200, "height": 900})
    found = Opened(context.new_page(), full_page[1])
    assert HOSTILE in found.cells("Layers", 1)
    found.page.locator("summary").first.click()
    assert found.page.get_by_role("table", name="Values of 6 of 6 reports").is_visible()
    found.check()
    context.close()
