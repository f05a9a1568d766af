"""The page in a real Chromium: it shows what the API says, follows it, and says so when it cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from extproc.app import App
from tests.dashboard.browser import colours, start, viewport
from tests.dashboard.world import World, wait_for

pytestmark = pytest.mark.real
LONG = "who holds the prefix of this prompt, and who is idle enough to go on from there? " * 8
NASTY = ['<img src=x onerror="document.title=1">', "</td><script>document.title=2</script>", 'a&amp;b\' "quoted"']


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    driver = start()
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    """A fresh tab state; at the end nothing may be in the console that the test has not taken out."""
    browser.get("about:blank")
    browser.get_log("browser")
    colours(browser, "light")
    viewport(browser, 1440, 1000)
    yield browser
    assert console(browser) == []


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(3, host=2000) as made:
        made.ask(LONG)
        made.send({"model": "nobody", "messages": []})
        made.settle()
        yield made


def console(page: webdriver.Chrome) -> list[str]:
    return [entry["message"] for entry in page.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def find(page: webdriver.Chrome, css: str) -> WebElement:
    return page.find_element(By.CSS_SELECTOR, css)


def text(page: webdriver.Chrome, css: str) -> str:
    return str(page.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", css))


def shows(page: webdriver.Chrome, css: str, wanted: str | Callable[[str], Any]) -> str:
    test = wanted if callable(wanted) else lambda found: found == wanted
    wait_for(lambda: test(text(page, css)), f"{css} shows {wanted!r}, last {text(page, css)!r}")
    return text(page, css)


def cells(page: webdriver.Chrome, css: str) -> list[list[str]]:
    script = "return [...document.querySelectorAll(arguments[0])].map(r => [...r.cells].map(c => c.textContent))"
    found: list[list[str]] = page.execute_script(script, css)
    return found


def open_page(page: webdriver.Chrome, world: World) -> None:
    page.get(world.url)
    console(page)  # what the page of an earlier test still had to say
    page.execute_script("localStorage.clear(); sessionStorage.clear()")
    page.get(world.url)
    wait_for(lambda: cells(page, "#fleet-table tbody tr"), "the fleet is shown")


def test_values_are_those_of_the_api(page: webdriver.Chrome, world: World) -> None:
    open_page(page, world)
    found = world.get("/v1/internal/overview")
    shows(page, "#replica", "ready")
    rows = cells(page, "#fleet-table tbody tr")
    assert len(rows) == len(found["instances"]) == 3
    for row, one in zip(rows, sorted(found["instances"], key=lambda one: one["name"]), strict=True):
        assert row[0] == one["name"] + one["address"]
        assert row[1:4] == [one["role"], one["state"], f"{one['synchronized']}/{one['streams']}"]
        assert row[5:8] == [str(sum(one["blocks"].values())), str(one["in_flight"]), f"{one['load']['waiting']:.0f}"]
        assert row[10] == str(one["chosen"])
    assert text(page, "[data-tile=streams] .value") == f"{sum(s['synchronized'] for s in found['streams'])} / 3"
    assert text(page, "[data-reason=model] b") == "1"
    decision = found["decisions"][1]
    line = cells(page, f"tr[data-number='{decision['number']}']")[0]
    assert line[1] == decision["chosen"]
    assert line[3:6] == [str(decision["prompt_tokens"]), str(decision["hit_tokens"]), str(decision["cached_tokens"])]
    bars = page.execute_script(
        "return [...document.querySelectorAll('#fleet-table tbody tr')].map(r => r.querySelector('.bar').title)"
    )
    for title, one in zip(bars, sorted(found["instances"], key=lambda one: one["name"]), strict=True):
        assert title.startswith(", ".join(f"{tier} {one['blocks'][tier]}" for tier in ("device", "host", "disk")))


def test_live_update_keeps_nodes_and_focus(page: webdriver.Chrome, world: World) -> None:
    open_page(page, world)
    page.execute_script("window.row = document.querySelector('[data-instance=engine-0]')")
    find(page, "#fleet-filter").send_keys("engine")
    before = world.get("/v1/internal/overview")
    exchange = world.ask("something new " + LONG, serve=False)
    name = exchange.record.decision.chosen.name  # type: ignore[union-attr]
    shows(page, f"[data-instance={name}] td:nth-child(7)", "1")
    world.compute(exchange)
    world.finish(exchange)
    world.settle()
    after = world.get("/v1/internal/overview")
    held = {one["name"]: sum(one["blocks"].values()) for one in after["instances"]}
    assert held[name] > {one["name"]: sum(one["blocks"].values()) for one in before["instances"]}[name]
    shows(page, f"[data-instance={name}] td:nth-child(6)", str(held[name]))
    shows(page, f"[data-instance={name}] td:nth-child(7)", "0")
    shows(page, "#decisions-count", lambda found: found.endswith(f"of {after['decisions_seen']}"))
    assert page.execute_script("return row === document.querySelector('[data-instance=engine-0]')")
    assert page.execute_script("return document.activeElement.id") == "fleet-filter"


def test_the_chart_has_lines_axes_and_a_cursor(page: webdriver.Chrome, world: World) -> None:
    open_page(page, world)
    world.ask(LONG)
    shows(page, "#legend [data-kind=chosen]", lambda found: re.fullmatch(r"\d+(\.\d)?%", found))
    wait_for(lambda: page.find_elements(By.CSS_SELECTOR, "#chart .series.chosen"), "a line is drawn")
    ticks = page.execute_script("return [...document.querySelectorAll('#chart .tick')].map(t => t.textContent)")
    assert {"0%", "100%", "now", "−15 min"} <= set(ticks)
    assert any(tick.endswith("/s") for tick in ticks)
    find(page, "#chart").send_keys(Keys.ARROW_LEFT)
    assert "available" in text(page, "#reading")


def test_a_decision_opens_to_its_reasons(page: webdriver.Chrome, world: World) -> None:
    world.ask(LONG)
    open_page(page, world)
    row = world.get("/v1/internal/overview")["decisions"][0]
    button = find(page, f"tr[data-number='{row['number']}'] .open")
    button.send_keys(Keys.ENTER)
    wait_for(lambda: page.find_elements(By.CSS_SELECTOR, ".detail .inner tbody tr"), "candidates are shown")
    whole = world.get(f"/v1/internal/decision?number={row['number']}")["decision"]
    table = cells(page, ".detail .inner tbody tr")
    assert [line[0].removesuffix("chosen") for line in table] == [one["name"] for one in whole["candidates"]]
    assert [float(line[1]) for line in table] == pytest.approx(
        [one["cost"][0] for one in whole["candidates"]], abs=1e-4
    )
    assert [line[2] for line in table] == [str(one["device_tokens"]) for one in whole["candidates"]]
    assert f"{whole['hit_tokens']} of {whole['prompt_tokens']} prompt tokens" in text(page, ".detail .why")
    assert button.get_attribute("aria-expanded") == "true"
    world.ask("push it down " + LONG)
    shows(page, "#decisions-count", lambda found: found.endswith(f"of {row['number'] + 1}"))
    assert page.execute_script("return document.querySelector('.detail').previousSibling.dataset.number") == str(
        row["number"]
    )
    button.send_keys(Keys.ENTER)
    assert not page.find_elements(By.CSS_SELECTOR, ".detail")


def test_explain_shows_the_endpoint_s_answer(page: webdriver.Chrome, world: World) -> None:
    open_page(page, world)
    ActionChains(page).send_keys("e").perform()
    find(page, "#explain-input").send_keys(LONG[:400], Keys.CONTROL, Keys.ENTER)
    wait_for(lambda: page.find_elements(By.ID, "tokens"), "tokens are shown")
    body = {"model": "demo", "messages": [{"role": "user", "content": LONG[:400]}]}
    found = world.get("/v1/internal/explain", body)
    ids = page.execute_script(
        "return [...document.querySelectorAll('#tokens .token small')].map(n => Number(n.textContent))"
    )
    assert ids == found["ids"]
    assert text(page, "[data-fact=Tokens]") == str(found["tokens"])
    assert text(page, "[data-fact='Goes to']") == found["scorers"][0]["chosen"]
    uses = {"pool": "the pool's own", "default": "default parameters"}
    assert [line[:3] for line in cells(page, "#scorers tbody tr")] == [
        [row["name"] + uses[row["use"]], row["chosen"], str(row["hit_tokens"])] for row in found["scorers"]
    ]
    holders = {line[0]: line[2] for line in cells(page, "#holders tbody tr")}
    expected = {
        one["name"]: f"{sum(one['ranks'][0])} of {found['blocks']}"
        for one in found["instances"]
        if any(one["ranks"][0])
    }
    assert holders == expected
    assert expected


def test_explain_says_why_not(page: webdriver.Chrome, world: World) -> None:
    open_page(page, world)
    find(page, "#explain-mode").send_keys("OpenAI")
    find(page, "#explain-input").send_keys('{"model": "gpt", "prompt": "x"}', Keys.CONTROL, Keys.ENTER)
    shows(page, "#explain-result", lambda found: "Would pass unscored: model" in found)
    find(page, "#explain-input").send_keys(" and more", Keys.CONTROL, Keys.ENTER)
    shows(page, "#explain-status", lambda found: found.startswith("bad_json"))
    assert [one for one in console(page) if "400" not in one] == []  # the browser notes each 400 by itself


def test_sorting_and_filters(page: webdriver.Chrome, world: World) -> None:
    open_page(page, world)
    heads = page.find_elements(By.CSS_SELECTOR, "#fleet-table thead .sort")
    blocks = next(head for head in heads if head.text == "Blocks")
    blocks.send_keys(Keys.ENTER)
    values = [int(row[5].replace(",", "")) for row in cells(page, "#fleet-table tbody tr")]
    assert values == sorted(values, reverse=True)
    assert blocks.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
    ActionChains(page).send_keys("/").perform()
    assert page.execute_script("return document.activeElement.id") == "fleet-filter"
    find(page, "#fleet-filter").send_keys("engine-1")
    assert [row[0] for row in cells(page, "#fleet-table tbody tr")] == ["engine-110.0.0.2:8000"]
    assert text(page, "#fleet-count") == "1 of 3 instances"


def test_keyboard_path(page: webdriver.Chrome, world: World) -> None:
    """Every control is reached in order, with a visible focus; shortcuts work; dialogs close."""
    open_page(page, world)
    seen = []
    for _ in range(60):
        ActionChains(page).send_keys(Keys.TAB).perform()
        now = page.execute_script(
            "const e = document.activeElement, s = getComputedStyle(e);"
            "return [e === document.body ? '' : e.id || e.textContent.trim().slice(0, 20),"
            " s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) > 0]"
        )
        if now[0] == "":
            break
        seen.append(now)
    names = [name for name, _ in seen]
    assert [name for name, visible in seen if not visible] == []
    order = [
        "Skip to the content",
        "pause",
        "theme",
        "help-button",
        "chart",
        "fleet-filter",
        "fleet-role",
        "decisions-filter",
    ]
    assert [name for name in names if name in order] == order
    ActionChains(page).send_keys("?").perform()
    assert page.execute_script("return document.getElementById('help').open")
    ActionChains(page).send_keys(Keys.ESCAPE).perform()
    assert not page.execute_script("return document.getElementById('help').open")
    for key, place in (("h", "hits"), ("f", "fleet"), ("d", "decisions"), ("s", "streams")):
        ActionChains(page).send_keys(key).perform()
        assert page.execute_script("return document.activeElement.id") == place
    ActionChains(page).send_keys("p").perform()
    assert find(page, "#pause").get_attribute("aria-pressed") == "true"
    ActionChains(page).send_keys("p").perform()


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_the_switch(page: webdriver.Chrome, world: World, scheme: str) -> None:
    colours(page, scheme)
    open_page(page, world)
    script = """
      const out = [];
      for (const node of document.querySelectorAll("body *")) {
        const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!own || !node.checkVisibility() || node.closest("svg")) continue;
        let back = node;
        while (back && /rgba\\(0, 0, 0, 0\\)/.test(getComputedStyle(back).backgroundColor)) back = back.parentElement;
        const paper = getComputedStyle(back ?? document.body).backgroundColor;
        out.push([node.className + " " + node.tagName, getComputedStyle(node).color, paper]);
      }
      return out;"""
    found = page.execute_script(script)
    assert len(found) > 60
    for name, ink, paper in found:
        one, other = sorted((luminance(ink), luminance(paper)))
        assert (other + 0.05) / (one + 0.05) >= 4.5, (name, ink, paper)
    paper = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) > 0.5) == (scheme == "light")
    for _ in range(2 if scheme == "light" else 1):
        find(page, "#theme").click()
    assert (luminance(page.execute_script("return getComputedStyle(document.body).backgroundColor")) > 0.5) != (
        scheme == "light"
    )


def test_narrow_screens_do_not_scroll_sideways(page: webdriver.Chrome, world: World) -> None:
    for width in (390, 768, 1440, 2560):
        viewport(page, width, 844, mobile=width < 700)
        open_page(page, world)
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
    viewport(page, 1440, 1000)


def test_problems_come_with_a_remedy(page: webdriver.Chrome, world: World) -> None:
    with World(2, instance={"engine-1": {"events": "tcp://127.0.0.1:9", "replay": None}}) as broken:
        open_page(page, broken)
        shows(page, "[data-problem=connect]", lambda found: "engine-1/0" in found and "tcp://*:5557" in found)
        shows(page, "[data-problem=empty] .badge", "1")
        shows(page, "[data-tile=streams] .more", "1 needs attention")
        broken.ask(LONG)
        find(page, "#all-streams summary").click()
        wait_for(lambda: "live" in str(cells(page, "#streams-table tbody tr")), "the stream is live")


def test_names_are_text(page: webdriver.Chrome) -> None:
    """Whatever an engine, a model or a client is called, it is shown and never run."""
    with World(NASTY, pool={"models": ["demo", NASTY[0]]}) as world:
        world.ask(LONG)
        world.send({"model": NASTY[1], "messages": [{"role": "user", "content": NASTY[0]}]})
        open_page(page, world)
        names = page.execute_script(
            "return [...document.querySelectorAll('#fleet-table .name')].map(n => n.textContent)"
        )
        assert sorted(names) == sorted(NASTY)
        find(page, "#decisions-table .open").click()
        find(page, "#explain-input").send_keys(NASTY[0], NASTY[1], Keys.CONTROL, Keys.ENTER)
        wait_for(lambda: page.find_elements(By.ID, "tokens"), "tokens are shown")
        assert page.execute_script("return document.title") == "kvcar"
        assert not page.find_elements(By.CSS_SELECTOR, "main img, main script")


def test_token(page: webdriver.Chrome) -> None:
    secret = "a-löng-secret"
    with World(1, admin={"token": secret}) as world:
        page.get(world.url)
        page.execute_script("localStorage.clear(); sessionStorage.clear()")
        page.get(world.url)
        shows(page, "#replica", "token needed")
        assert not find(page, "#content").is_displayed()
        field = find(page, "#token-input")
        wait_for(field.is_displayed, "the field")
        field.send_keys("wrong", Keys.ENTER)
        shows(page, "#token-error", "This token is not the right one.")
        field.send_keys(secret, Keys.ENTER)
        shows(page, "#replica", "ready")
        wait_for(find(page, "#content").is_displayed, "the content")
        assert page.execute_script("return [localStorage.length, sessionStorage.getItem('kvcar-token')]") == [1, secret]
        page.refresh()
        shows(page, "#replica", "ready")
        assert [one for one in console(page) if "401" not in one] == []  # the browser notes each 401 by itself


def test_server_away_and_back(page: webdriver.Chrome) -> None:
    world = World(2)
    with world:
        world.ask(LONG)
        open_page(page, world)
        shows(page, "#decisions-count", "last 1 of 1")
        world.stop_app()
        shows(page, "#replica", "unreachable")
        shows(page, "[data-banner=unreachable] span", lambda found: re.search(r"since \d\d:\d\d:\d\d.* old\.", found))
        assert cells(page, "#fleet-table tbody tr"), "the last data stays"
        world.start()
        find(page, "[data-banner=unreachable] button").click()
        shows(page, "#replica", "ready")
        shows(page, "#decisions-count", "")  # another process: nothing decided yet
        wait_for(lambda: not page.find_elements(By.CSS_SELECTOR, "[data-banner=unreachable]"), "the banner is gone")
        world.ask(LONG)
        shows(page, "#decisions-count", "last 1 of 1")
        assert [one for one in console(page) if "ERR_CONNECTION" not in one and "ERR_EMPTY" not in one] == []


def test_banners(page: webdriver.Chrome, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the status may say beside: drift, a refused configuration, not ready."""
    with World(1) as world:
        status = world.app.status
        more: dict[str, Any] = {"reload_error": "kvcar.yaml:3: pools[0].scorer: unknown"}
        drift = {"state": "drift", "likely_cause": "other prompt tokens", "remedy": "`kvcar doctor` shows them"}
        check = {"self_verification": drift}

        def changed() -> dict[str, Any]:
            now = status()
            refused = {"name": "etcd", "error": "connection refused", "refused": {"x": "twice"}}
            return {**now, "pools": [{**now["pools"][0], **check}], "discovery": [refused], **more}

        world.app.status = changed  # type: ignore[method-assign]
        monkeypatch.setattr(App, "ready", property(lambda _app: False))
        open_page(page, world)
        shows(page, "[data-banner=reload]", lambda found: "pools[0].scorer" in found)
        shows(
            page, "[data-banner=drift-demo]", lambda found: "other prompt tokens" in found and "kvcar doctor" in found
        )
        shows(page, "[data-banner='discovery etcd']", "discovery etcd: connection refused")
        shows(page, "[data-banner='discovery etcd, instance x']", "discovery etcd, instance x: twice")
        shows(page, "[data-banner=not-ready]", lambda found: "not ready" in found)
        shows(page, "#replica", "not ready")
        check["self_verification"] = {**drift, "state": "ok"}
        more["reload_error"] = None
        gone = "[data-banner=reload], [data-banner=drift-demo]"
        wait_for(lambda: not page.find_elements(By.CSS_SELECTOR, gone), "banners go")


def test_128_streams(page: webdriver.Chrome) -> None:
    with World([f"engine-{number:03d}" for number in range(128)]) as world:
        for number in range(20):
            world.ask(f"{number} {LONG}")
        world.settle()
        data = json.dumps(world.get("/v1/internal/overview"))
        assert len(data) < 400_000
        open_page(page, world)
        shows(page, "#fleet-count", "128 instances")
        shows(page, "#streams-count", lambda found: found.endswith("of 128 streams synchronized"))
        assert len(cells(page, "#fleet-table tbody tr")) == 128
        find(page, "#explain-input").send_keys("0 " + LONG, Keys.CONTROL, Keys.ENTER)
        wait_for(lambda: page.find_elements(By.CSS_SELECTOR, "#scorers tbody tr"), "scorers are shown")
        sticky = page.execute_script(
            "const box = document.querySelector('#fleet .scroll'); box.scrollTop = 2000;"
            "const top = (node) => node.getBoundingClientRect().top;"
            "return top(document.querySelector('#fleet-table thead th')) - top(box)"
        )
        assert abs(sticky) <= 2
