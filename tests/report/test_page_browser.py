"""The page in a real browser: drawn, sorted, searched, clicked, dark, narrow, by keyboard.

Needs Debian's chromium (`apt-get install chromium`) and playwright; skipped where they are not.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.shell import run
from tests.report.test_page import TestEscapes as Escapes

import fpgm
from fpgm.pruning.plan import Cut, Group
from fpgm.report.page import compare, render_page, report
from fpgm.report.records import AnalysisRecord, decode
from fpgm.report.run import Run
from fpgm.report.serve import create_server

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "small"
    run(
        "prune", "resnet20", "--weights", "shipped", "--macs", 0.5, "--recover", "weights",
        "--data", "cifar10-sample", "--images", 64, "--test", 64, "--out", place,
    )  # fmt: skip
    return place


@pytest.fixture(scope="module")
def address(folder: Path) -> str:
    """Where the page about the run is."""
    return report(folder).as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(
            executable_path=CHROMIUM, args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


class Opened:
    """A page, and what it complained about."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.page = browser.new_page(**options)
        self.complaints: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._asked)
        self.asked: list[str] = []
        self.page.goto(address)
        self.page.wait_for_function(
            "[...document.querySelectorAll('.chart')].every(c => c.querySelector('svg'))"
        )

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.asked.append(request.url)


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Opened]:
    shown = Opened(browser, address, viewport={"width": 1200, "height": 900})
    yield shown
    shown.page.close()
    assert shown.complaints == []
    assert shown.asked == []


def marks(shown: Opened, place: str, mark: str) -> int:
    """How many marks of a kind a chart has drawn."""
    result: int = shown.page.locator(f"{place} svg path[aria-roledescription='{mark}']").count()
    return result


def test_charts_are_drawn_and_nothing_is_fetched(opened: Opened) -> None:
    assert opened.page.title() == "resnet20 · fpgm"
    assert opened.page.locator("[data-chart] svg").count() == 2
    assert marks(opened, "[data-chart='0']", "bar") == 3  # original, compact, recovered
    assert marks(opened, "[data-chart='1']", "bar") == 2 * 12


def test_choosing_a_layer_shows_its_filters(opened: Opened) -> None:
    opened.page.click(".layer >> text=layer3.0.conv1")
    details = opened.page.locator("#details")
    assert details.locator("h3").inner_text() == "layer3.0.conv1"
    assert "64 filters, 16 removed (25.0%)." in details.inner_text()
    assert details.locator(".strip span").count() == 64
    assert details.locator(".strip .removed").count() == 16
    opened.page.wait_for_selector("#map svg")
    assert marks(opened, "#map", "point") == 64 + 1
    pressed = opened.page.locator(".layer[aria-pressed='true']")
    assert pressed.count() == 1
    assert "layer3.0.conv1" in pressed.inner_text()


def test_a_layer_that_stays_says_why(opened: Opened) -> None:
    opened.page.click(".layer >> text=linear")
    text = opened.page.locator("#details").inner_text()
    assert "10 filters, all kept." in text
    assert "Frozen: the model's output." in text


def test_by_keyboard(opened: Opened) -> None:
    opened.page.locator(".layer").nth(3).focus()
    opened.page.keyboard.press("Enter")
    assert opened.page.locator("#details h3").inner_text() == "layer1.1.conv1"
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Space")
    assert opened.page.locator("#details h3").inner_text() == "layer1.1.conv2"


def column(opened: Opened, number: int) -> list[str]:
    cells = opened.page.locator(f"#table tbody tr:not([hidden]) > :nth-child({number})")
    result: list[str] = cells.all_inner_texts()
    return result


def test_sorting_both_ways(opened: Opened) -> None:
    opened.page.click("#table thead >> text=filters")
    counts = [int(text) for text in column(opened, 2)]
    assert counts == sorted(counts)
    assert opened.page.locator("th[aria-sort='ascending']").inner_text().startswith("filters")
    opened.page.click("#table thead >> text=filters")
    assert [int(text) for text in column(opened, 2)] == sorted(counts, reverse=True)
    opened.page.click("#table thead >> text=deviation")
    fractions = [float(text) for text in column(opened, 6)]
    assert fractions == sorted(fractions)


def test_searching(opened: Opened) -> None:
    opened.page.fill("#search", "layer2.1")
    assert column(opened, 1) == ["layer2.1.conv1", "layer2.1.conv2"]
    assert opened.page.locator("#match-count").inner_text() == "2 of 20"
    opened.page.fill("#search", "6. layer2.0.conv2")  # the group, to which others write too
    assert "layer3.2.conv2" in column(opened, 1)
    opened.page.fill("#search", "the model's output")
    assert column(opened, 1) == ["linear"]
    opened.page.fill("#search", "")
    assert len(column(opened, 1)) == 20


def test_from_the_table_to_the_layer(opened: Opened) -> None:
    opened.page.click("#table .link >> text=layer2.1.conv2")
    assert opened.page.locator("#details h3").inner_text() == "layer2.1.conv2"
    assert opened.page.evaluate("document.activeElement.id") == "details"


def background(shown: Opened) -> str:
    result: str = shown.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return result


def test_light_and_dark(opened: Opened, browser: Any, address: str) -> None:
    assert background(opened) == "rgb(255, 255, 255)"
    opened.page.click("#theme")
    assert background(opened) == "rgb(20, 24, 29)"
    assert opened.page.locator("#theme").get_attribute("aria-pressed") == "true"
    dark = Opened(browser, address, color_scheme="dark")
    assert background(dark) == "rgb(20, 24, 29)"
    label = dark.page.locator("[data-chart='0'] svg text").first.get_attribute("fill")
    assert label == "#e8ecf0"
    dark.page.close()


def test_on_a_phone_nothing_sticks_out(browser: Any, address: str) -> None:
    narrow = Opened(browser, address, viewport={"width": 360, "height": 740})
    assert narrow.page.evaluate("document.documentElement.scrollWidth") <= 360
    box = narrow.page.locator(".layer").first.bounding_box()
    assert box["width"] > 250
    narrow.page.close()


def test_on_paper_everything_is_shown_on_white(opened: Opened) -> None:
    opened.page.click("#theme")
    opened.page.set_viewport_size({"width": 700, "height": 900})
    opened.page.emulate_media(media="print")
    assert not opened.page.locator("#theme").is_visible()
    assert opened.page.locator(".diagram").evaluate("e => e.scrollHeight <= e.clientHeight + 1")
    assert background(opened) == "rgb(255, 255, 255)"
    assert opened.page.locator("#table").evaluate("e => e.getBoundingClientRect().right") <= 700
    text = opened.page.locator("[data-chart='0'] svg text").first
    assert text.evaluate("e => getComputedStyle(e).fill") == "rgb(27, 31, 36)"


def test_charts_in_the_dark_have_its_colours(opened: Opened) -> None:
    bar = opened.page.locator("[data-chart='0'] svg path[aria-roledescription='bar']").first
    assert bar.get_attribute("fill") == "#0072b2"
    opened.page.click("#theme")
    opened.page.wait_for_selector(
        "[data-chart='0'] svg path[aria-roledescription='bar'][fill='#56b4e9']"
    )
    assert opened.page.locator("#theme").inner_text() == "Dark"  # pressed, and not renamed too


def test_what_was_chosen_outlives_a_reload(opened: Opened) -> None:
    opened.page.click(".layer >> text=layer2.1.conv2")
    opened.page.fill("#search", "layer2.1")
    opened.page.click("#theme")
    opened.page.reload()
    assert opened.page.locator("#details h3").inner_text() == "layer2.1.conv2"
    assert opened.page.locator("#match-count").inner_text() == "2 of 20"
    assert background(opened) == "rgb(20, 24, 29)"


def test_what_a_reader_of_the_screen_hears(opened: Opened) -> None:
    announcement = opened.page.locator("#announcement")
    assert announcement.inner_text() == ""
    opened.page.click(".layer >> text=layer1.0.conv1")
    assert announcement.inner_text() == "layer1.0.conv1: 16 filters, 4 removed (25.0%)."
    assert opened.page.locator("#details").get_attribute("aria-live") is None
    label = opened.page.locator(".layer").first.get_attribute("aria-label")
    assert label == "conv1: 10 of 16 filters kept; produces stream 1. conv1"


def test_all_groups_of_a_layer(opened: Opened) -> None:
    opened.page.click(".layer >> text=layer3.2.conv2")
    text = opened.page.locator("#details").inner_text()
    assert "Groups: 1. conv1, with 9 other layers; 6. layer2.0.conv2, with 5" in text


def test_without_values_last_and_no_empty_columns(browser: Any, tmp_path: Path) -> None:
    layers = [{"layer": name, "norms": [1.0, 2.0], "deviation": value, "macs_share": 0.1}
              for name, value in (("a", 0.5), ("b", None), ("c", 0.25))]  # fmt: skip
    plan = fpgm.Plan("", {}, (), groups=(Group("a", ("a", "b", "c"), 2, 2),))
    loaded_run = Run("a", plan=plan, analysis=decode(AnalysisRecord, {"layers": layers}))
    (tmp_path / "a.html").write_text(render_page(loaded_run))
    shown = Opened(browser, (tmp_path / "a.html").as_uri())
    heads = shown.page.locator("#table thead th").all_inner_texts()
    assert heads == ["layer", "filters", "kept", "removed", "MACs", "deviation", "group"]
    orders = []
    for _ in range(2):
        shown.page.click("#table thead >> text=deviation")
        orders.append(column(shown, 1))
    assert orders == [["c", "a", "b"], ["a", "c", "b"]]
    assert shown.complaints == []
    shown.page.close()


def test_long_names_keep_their_ends(browser: Any, tmp_path: Path) -> None:
    """Cut off at the left, and whole when pointed at."""
    name = ".".join(["backbone.stage.block"] * 6) + ".last"
    loaded_run = Run("a", plan=fpgm.Plan("", {}, (), groups=(Group(name, (name, "b"), 2, 2),)))
    (tmp_path / "a.html").write_text(render_page(loaded_run))
    shown = Opened(browser, (tmp_path / "a.html").as_uri(), viewport={"width": 360, "height": 700})
    button = shown.page.locator(".layer").first
    assert button.get_attribute("title") == name
    right = "getBoundingClientRect().right"
    ends = f"e => e.querySelector('bdi').{right} - e.{right}"
    assert abs(button.locator(".name").evaluate(ends)) < 1
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 360
    shown.page.close()


def wide(tmp_path: Path) -> str:
    """A network with many streams at once, 120 groups, long names and a thousand classes."""
    names = [f"backbone.stage{n // 10}.block{n}.branch.conv" for n in range(120)]
    groups = [Group(name, (name, names[n - n % 10 + 9]), 64, 40) for n, name in enumerate(names)]
    layers = [{"layer": name, "norms": [1.0 + n for n in range(64)]} for name in names]
    layers.append({"layer": "head", "norms": [1.0] * 1000})
    cuts = tuple(Cut(f"{name}.weight", 0, 64, tuple(range(40)), "filter") for name in names)
    plan = fpgm.Plan("", {}, cuts, groups=tuple(groups), macs_before=2, macs_after=1)
    loaded_run = Run("a", plan=plan, analysis=decode(AnalysisRecord, {"layers": layers}))
    (tmp_path / "a.html").write_text(render_page(loaded_run))
    return (tmp_path / "a.html").as_uri()


def test_many_streams_leave_room_for_names_and_counts(browser: Any, tmp_path: Path) -> None:
    shown = Opened(browser, wide(tmp_path), viewport={"width": 360, "height": 740})
    row = shown.page.locator(".layer").nth(20)
    inside = row.locator(".count").bounding_box()
    assert inside["x"] + inside["width"] <= row.bounding_box()["x"] + row.bounding_box()["width"]
    assert row.locator(".name").bounding_box()["width"] >= 80
    assert row.locator("svg").bounding_box()["width"] <= 90
    shown.page.close()


def test_a_thousand_classes_leave_room_for_64_filters(browser: Any, tmp_path: Path) -> None:
    """A quarter of the length, since a sixteenth would not be seen; of it 40 of 64 are filled."""
    shown = Opened(browser, wide(tmp_path), viewport={"width": 1200, "height": 900})
    bar = shown.page.locator(".layer").first.locator(".bar")
    complete = bar.bounding_box()["width"]
    kept = bar.locator(".kept").bounding_box()["width"]
    dropped = bar.locator(".removed").bounding_box()["width"]
    assert (kept + dropped) / complete == pytest.approx((64 / 1000) ** 0.5, rel=0.05)
    assert kept / (kept + dropped) == pytest.approx(40 / 64, rel=0.05)
    shown.page.close()


def test_a_long_chart_scrolls_in_its_place_by_keyboard_too(browser: Any, tmp_path: Path) -> None:
    shown = Opened(browser, wide(tmp_path), viewport={"width": 1200, "height": 900})
    chart = shown.page.locator("[data-chart='0']")
    assert chart.bounding_box()["height"] <= 620
    assert chart.evaluate("e => e.scrollHeight") > 1000
    assert chart.get_attribute("tabindex") == "0"
    axis = chart.locator("svg text >> text='units'").bounding_box()
    assert axis["y"] < chart.bounding_box()["y"] + 60  # at the top, where reading begins
    shown.page.emulate_media(media="print")
    assert chart.bounding_box()["height"] > 1000
    shown.page.close()


def test_no_label_of_a_chart_is_cut(opened: Opened) -> None:
    opened.page.click(".layer >> text=layer3.0.conv1")
    opened.page.wait_for_selector("#map svg")
    cut = """[...document.querySelectorAll('.chart svg')].flatMap(svg => {
        const all = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter(text => {
            const own = text.getBoundingClientRect();
            return own.width && (own.right > all.right + 1 || own.left < all.left - 1);
        }).map(text => text.textContent);
    })"""
    assert opened.page.evaluate(cut) == []


def test_headings_are_an_outline(opened: Opened) -> None:
    """No level is skipped: readers of the screen go from one to the next."""
    result = opened.page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(e => e.tagName)")
    assert result.count("H1") == 1
    levels = [int(name[1]) for name in result]
    assert all(after - before <= 1 for before, after in pairwise(levels))
    above = opened.page.locator("h2").all_inner_texts()
    assert above == ["Summary", "The network", "Charts", "Layers", "How to reproduce"]


def test_arrows_go_from_layer_to_layer(opened: Opened) -> None:
    opened.page.locator(".layer").first.focus()
    focused = "document.activeElement.dataset.layer"
    for key, layer in (("ArrowDown", "1"), ("ArrowUp", "0"), ("End", "19"), ("Home", "0")):
        opened.page.keyboard.press(key)
        assert opened.page.evaluate(focused) == layer
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert opened.page.evaluate(outline) == "solid"  # one sees where one is


def test_on_a_phone_a_layer_s_filters_come_into_sight(browser: Any, address: str) -> None:
    narrow = Opened(browser, address, viewport={"width": 360, "height": 740})
    narrow.page.locator("#h-network").scroll_into_view_if_needed()
    narrow.page.click(".layer >> text=layer1.0.conv1")
    top = "document.getElementById('details').getBoundingClientRect().top"
    assert 0 <= narrow.page.evaluate(top) < 0.6 * 740
    narrow.page.click("#table .link >> text=layer3.1.conv2")
    assert narrow.page.locator("#details h3").inner_text() == "layer3.1.conv2"
    assert 0 <= narrow.page.evaluate(top) < 0.6 * 740
    narrow.page.close()


def test_on_a_phone_names_stay_in_sight_when_the_table_is_pushed(
    browser: Any, address: str
) -> None:
    narrow = Opened(browser, address, viewport={"width": 360, "height": 740})
    name = narrow.page.locator("#table tbody th").first
    before = name.bounding_box()["x"]
    narrow.page.locator(".scroll").evaluate("e => { e.scrollLeft = 200; }")
    assert name.bounding_box()["x"] == pytest.approx(before, abs=2)
    narrow.page.close()


def test_small_shares_are_no_zeros(opened: Opened) -> None:
    opened.page.fill("#search", "the model's output")
    assert column(opened, 4) == ["0%"]  # nothing goes
    assert column(opened, 5) == ["<0.1%"]  # of the MACs: little, and not nothing


def test_on_paper_a_chart_stays_with_its_heading(opened: Opened) -> None:
    opened.page.set_viewport_size({"width": 700, "height": 900})
    opened.page.emulate_media(media="print")
    for place in ("figure", ".details", "tr"):
        broken = opened.page.locator(place).first.evaluate("e => getComputedStyle(e).breakInside")
        assert broken == "avoid"
    after = opened.page.locator("#h-how").evaluate("e => getComputedStyle(e).breakAfter")
    assert after == "avoid"


def test_where_the_clipboard_is_closed_the_command_is_selected(opened: Opened) -> None:
    opened.page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', "
        "{ value: { writeText: () => Promise.reject(new Error('no')) } })"
    )
    opened.page.click("#copy")
    opened.page.wait_for_selector("#copy >> text=Selected")
    assert opened.page.evaluate("String(getSelection())").startswith("fpgm prune resnet20")


def test_names_that_try_to_be_code(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "evil.html").write_text(render_page(Escapes().evil_run()))
    shown = Opened(browser, (tmp_path / "evil.html").as_uri())
    shown.page.locator(".layer").first.click()
    shown.page.wait_for_selector("#map svg")
    assert shown.page.evaluate("window.hurt") is None
    assert "</script>" in shown.page.locator("h1").inner_text()
    assert shown.complaints == []
    shown.page.close()


def test_a_comparison(browser: Any, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    run("prune", "resnet20", "--rate", 0.3, "--out", other)
    file = compare([folder, other], tmp_path / "both.html")
    shown = Opened(browser, file.as_uri())
    assert "other" in shown.page.locator("thead").inner_text()
    assert shown.page.locator("tbody tr:has-text('Accuracy') td").nth(1).inner_text() == "–"
    assert "Settings" in shown.page.locator("tbody th[scope='rowgroup']").all_inner_texts()
    assert shown.page.locator("[data-chart] svg").count() >= 1
    assert shown.complaints == []
    shown.page.close()


def test_a_served_page_follows_its_folder(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"model": {"name": "digits"}}')
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"epoch": 1, "test_accuracy": 0.25}\n')
    running = create_server(tmp_path)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        shown = Opened(browser, f"http://127.0.0.1:{running.server_address[1]}/")
        assert "25.00%" in shown.page.locator(".cards").inner_text()
        shown.page.click("#theme")
        file.write_text('{"epoch": 1, "test_accuracy": 0.25}\n{"epoch": 2, "test_accuracy": 0.5}\n')
        shown.page.wait_for_function(
            "document.querySelector('.cards').innerText.includes('50.00%')", timeout=15_000
        )
        assert background(shown) == "rgb(20, 24, 29)"  # as it was chosen before the reload
        assert shown.complaints == []
        shown.page.close()
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def test_the_version_is_the_package_s(folder: Path) -> None:
    assert fpgm.__version__ in report(folder).read_text()
