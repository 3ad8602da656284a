"""The page in a real browser: it loads by itself, draws what it says, responds, and fits."""

from pathlib import Path

import pytest

from loka.report.write import write_report

WIDTHS = (1280, 390)

# Elements with text that reach past the window, or whose text is cut off within them.
CLIPPED = """
(() => {
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    if (element.closest("[hidden], noscript, script, style, defs") || !element.textContent.trim()) continue;
    const box = element.getBoundingClientRect();
    if (!box.width) continue;
    const cut = getComputedStyle(element).overflowX === "hidden" && element.scrollWidth > element.clientWidth + 1;
    const ellipsis = getComputedStyle(element).textOverflow === "ellipsis";
    if (box.right > innerWidth + 1 || box.left < -1 || (cut && !ellipsis))
      found.push(`${element.tagName} ${element.textContent.slice(0, 40)} ${Math.round(box.left)}..${Math.round(box.right)}`);
  }
  return found;
})()
"""


@pytest.fixture
def page(whole_run: Path) -> Path:
    return write_report(whole_run)


def texts(tab, selector: str) -> list[str]:
    return tab.evaluate(f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)")


@pytest.mark.parametrize("width", WIDTHS)
def test_loads_alone_and_without_complaint(chromium, page: Path, width: int) -> None:
    chromium.open(page, width=width)
    assert chromium.complaints == []
    assert chromium.requests == []
    assert texts(chromium, "h1") == [
        "Serving 1.80× as fast at +0.003\N{NO-BREAK SPACE}% ±\N{NO-BREAK SPACE}0.020\N{NO-BREAK SPACE}% log-loss"
    ]
    assert texts(chromium, "main > section:not([hidden]) h2") == [
        "Where low precision is safe, and where it pays",
        "The plan",
        "What was rejected, and why",
        "What the values look like",
        "Findings",
        "Training",
        "Where the time goes",
        "Where it was measured",
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_clipped(chromium, page: Path, width: int, scheme: str) -> None:
    chromium.open(page, width=width, scheme=scheme)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(CLIPPED) == []


def test_the_map_puts_each_site_into_its_field(chromium, page: Path) -> None:
    chromium.open(page, width=1280)
    boxes = chromium.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.point')].map((e) => {"
        "const b = e.getBoundingClientRect();"
        "return [e.dataset.site, [b.x + b.width / 2, b.y + b.height / 2, b.width * b.height]]; }))"
    )
    limits = chromium.evaluate(
        "[...document.querySelectorAll('#map .limit')].map((e) => { const b = e.getBoundingClientRect(); return [b.x, b.y]; })"
    )
    fast, safe = limits[0][0], limits[1][1]  # right of the one, above the other
    fields = {site: (x > fast, y < safe) for site, (x, y, _) in boxes.items()}
    assert fields == {
        "layers.0.hidden": (True, True),
        "layers.1.hidden": (False, True),
        "layers.0.out": (True, False),
        "top.0": (False, False),
    }
    assert boxes["layers.0.hidden"][2] > 2.5 * boxes["layers.1.hidden"][2]  # 60 against 20 % of the time


def test_hover_and_focus_tell_numbers_and_reason(chromium, page: Path) -> None:
    chromium.open(page, width=1280)
    chromium.hover('.point[data-site="layers.0.out"]')
    tip = texts(chromium, "#tip:not([hidden])")
    assert "layers.0.out" in tip[0]
    assert "2.00× as fast" in tip[0]
    assert "0.5 in fprop, limit 0.2" in tip[0]
    assert "no kernel is able and accurate enough" in tip[0]
    chromium.evaluate("document.querySelector('.point[tabindex=\"0\"]').focus()")
    chromium.press("ArrowRight")
    assert "layers.1.hidden" in texts(chromium, "#tip:not([hidden])")[0]


def test_the_table_sorts_and_filters(chromium, page: Path) -> None:
    chromium.open(page, width=1280)
    sites = "#plan tbody .site-link"
    assert texts(chromium, sites)[0] == "layers.0.hidden"  # most of the time first
    chromium.click('[data-sort="site"]')
    assert texts(chromium, sites) == ["layers.0.hidden", "layers.0.out", "layers.1.hidden", "top.0"]
    chromium.click('[data-sort="site"]')
    assert texts(chromium, sites) == ["top.0", "layers.1.hidden", "layers.0.out", "layers.0.hidden"]
    assert chromium.evaluate("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "descending"
    chromium.type("#plan input", "LAYERS.1")
    assert texts(chromium, sites) == ["layers.1.hidden"]
    assert texts(chromium, "#plan .found") == ["1 of 4 rows"]
    chromium.type("#plan input", " nothing like it")
    assert texts(chromium, sites) == []
    assert "No row matches" in texts(chromium, "#plan .empty")[0]


def test_precision_filters_rows(chromium, page: Path) -> None:
    chromium.open(page, width=1280)
    chromium.click('#plan [data-value="low"]')
    assert texts(chromium, "#plan tbody .site-link") == ["layers.0.hidden"]
    chromium.click('#plan [data-value="high"]')
    assert len(texts(chromium, "#plan tbody .site-link")) == 3


def test_choosing_a_site_shows_its_values(chromium, page: Path) -> None:
    chromium.open(page, width=1280)
    chromium.click('.point[data-site="layers.0.out"]')
    assert chromium.evaluate("document.querySelector('#distributions select').value") == "layers.0.out"
    int8 = texts(chromium, "#distributions .zones b")
    chromium.click('#distributions [data-value="e5m2"]')
    e5m2 = texts(chromium, "#distributions .zones b")
    assert e5m2[0] != int8[0]
    assert e5m2[2] == "0 %"  # a normal distribution has nothing 32 binades below its largest value


def test_bars_of_time_are_as_long_as_their_kinds_take(chromium, page: Path) -> None:
    chromium.open(page, width=1280)
    rects = "[...document.querySelectorAll('#time .goal:first-child .chart svg > rect')]"
    # The gap between two pieces is 1.
    boxes = chromium.evaluate(f"{rects}.map((e) => {{ const b = e.getBBox(); return [b.y, b.width + 1]; }})")
    rows = {y: [width for at, width in boxes if at == y] for y, _ in boxes}
    before, after = (rows[y] for y in sorted(rows))
    a_millisecond = sum(before) / 29.4
    assert before == pytest.approx([a_millisecond * ms for ms in (18.0, 5.0, 2.1, 4.3)], rel=1e-3)
    assert after == pytest.approx([a_millisecond * ms for ms in (12.5, 5.1, 2.1, 2.3, 6.2)], rel=1e-3)
    framed = chromium.evaluate(f"{rects}.map((e) => e.hasAttribute('stroke-dasharray'))")
    assert framed == [False] * 3 + [True] + [False] * 4 + [True]  # what the GPU waits is no work
    assert texts(chromium, "#time .goal:first-child .key li") == [
        "GEMM: 18 ms → 12.5 ms",
        "norm, activation: 5 ms → 5.1 ms",
        "optimizer: 2.1 ms → 2.1 ms",
        "cast: 0 µs → 2.3 ms",
        "waiting for the host: 4.3 ms → 6.2 ms",
    ]


def test_the_theme_follows_the_system_until_it_is_chosen(chromium, page: Path) -> None:
    chromium.open(page, width=1280, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = chromium.evaluate(background)
    chromium.open(page, width=1280, scheme="light")
    light = chromium.evaluate(background)
    assert dark != light
    chromium.click("#theme")  # auto → dark
    assert chromium.evaluate(background) == dark
    chromium.click("#theme")
    chromium.click("#theme")  # back to auto


def test_an_empty_run_says_what_to_do(chromium, tmp_path: Path) -> None:
    chromium.open(write_report(tmp_path), width=390)
    assert chromium.complaints == []
    assert texts(chromium, "h1") == ["Nothing measured yet"]
    assert any(command.startswith("loka measure ") for command in texts(chromium, "#missing code"))
    assert chromium.evaluate(CLIPPED) == []


@pytest.mark.parametrize(("base", "low"), [(100.0, 30000.0), (30000.0, 100.0)])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_map_with_all_sites_at_one_edge_fits(
    chromium, tmp_path: Path, one_sided_run, base: float, low: float, width: int
) -> None:
    chromium.open(write_report(one_sided_run(base, low)), width=width)
    assert chromium.evaluate(CLIPPED) == []
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width


def test_a_hostile_name_is_only_text(chromium, whole_run: Path, survey, comparison) -> None:
    import msgspec

    hostile = "</script><script>document.title='broken'</script><b>x</b>"
    msgspec.structs.replace(comparison, model=hostile).save(whole_run)
    chromium.open(write_report(whole_run), width=1280)
    assert chromium.complaints == []
    assert texts(chromium, "#run-title") == [hostile]
    assert "broken" not in chromium.evaluate("document.title")


def test_a_thousand_sites_stay_small_and_quick(chromium, big_run) -> None:
    page = write_report(big_run(1000))
    assert page.stat().st_size < 3e6
    chromium.open(page, width=1280)
    assert chromium.complaints == []
    assert chromium.evaluate("document.querySelectorAll('.point').length") == 1000
    assert len(texts(chromium, "#plan tbody tr")) == 60
    chromium.click("#plan .more")
    assert len(texts(chromium, "#plan tbody tr")) == 1000
