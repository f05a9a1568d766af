"""Makes the pictures of docs/dashboard.md: `python -m tests.dashboard.screenshots [FOLDER]`, half a minute.

The traffic is real decisions of a real App over engine models; only the clock of the history is wound back.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from tests.dashboard.browser import colours, start, viewport
from tests.dashboard.world import Exchange, World, wait_for

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WORDS = "the router knows what every engine holds and sends each prompt to the one that can go on from there".split()
SYSTEM = "You are a careful assistant. " + " ".join(WORDS * 6)
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]
QUESTION = "Which engine has this prompt in its cache?"


def traffic(world: World, *, steps: int, chats: int, each: float, seed: int = 7) -> list[dict[str, str]]:
    """Chats that grow turn by turn, over the last quarter of an hour. Returns one of them."""
    draw = random.Random(seed)
    talks: list[list[dict[str, str]]] = []
    for number in range(chats):
        talks.append([{"role": "system", "content": SYSTEM if number % 3 else f"Agent {number}. {SYSTEM}"}])
    running: list[tuple[int, int, Exchange, list[dict[str, str]]]] = []  # first byte at, end at, ...
    for step in range(steps):
        quiet = 0.15 if 0.45 < step / steps < 0.5 else 1.0
        for at in [one for one in running if one[0] == step]:
            world.compute(at[2])
        for at in [one for one in running if one[1] == step]:
            world.finish(at[2])
            at[3].append({"role": "assistant", "content": " ".join(draw.choices(WORDS, k=30))})
            running.remove(at)
        while draw.random() < each * quiet / (1 + each * quiet):
            talk = talks[draw.randrange(chats)]
            if any(one[3] is talk for one in running):
                continue
            if len(talk) > 16:
                del talk[1:]
            talk.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=draw.randint(12, 60)))})
            kind = draw.random()
            if kind < 0.03:
                world.send({"model": "demo", "messages": IMAGE})
            elif kind < 0.04:
                world.send({"model": "gpt-unknown", "messages": talk})
            else:
                first = step + draw.randint(1, 2)
                running.append((first, first + draw.randint(1, 6), world.ask(list(talk), serve=False), talk))
        world.remember(900 - step * 900 / steps)
    world.settle()
    world.show_past()
    return talks[0]


def open_page(page: webdriver.Chrome, world: World, *, theme: str = "light") -> None:
    colours(page, theme)
    page.get(world.url)
    wait_for(lambda: page.find_elements(By.CSS_SELECTOR, "#fleet-table tbody tr"), "the fleet is shown")


def explain(page: webdriver.Chrome, text: str) -> None:
    box = page.find_element(By.ID, "explain-input")
    Select(page.find_element(By.ID, "explain-mode")).select_by_value("json")
    page.execute_script("arguments[0].value = arguments[1]", box, text)
    page.find_element(By.CSS_SELECTOR, "#explain-form button").click()
    wait_for(lambda: page.find_elements(By.ID, "tokens"), "tokens are shown")


def whole(page: webdriver.Chrome, path: Path) -> None:
    """The page from top to bottom."""
    page.execute_script("window.scrollTo(0, 0); document.activeElement.blur()")
    height = page.execute_script("return document.documentElement.scrollHeight")
    width = page.execute_script("return window.innerWidth")
    viewport(page, width, min(height, 4000), scale=page.execute_script("return devicePixelRatio"))
    page.save_screenshot(str(path))


def main(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page = start()
    try:
        roles = {"engine-3": {"events": "tcp://127.0.0.1:9", "replay": None}}
        with World(4, blocks=700, host=1500, past=900, instance=roles, pool={"scorer": {"name": "car"}}) as world:
            talk = traffic(world, steps=450, chats=24, each=1.1)
            request = json.dumps({"model": "demo", "messages": [*talk, {"role": "user", "content": QUESTION}]})
            viewport(page, 1440, 1000)
            open_page(page, world, theme="dark")
            page.find_element(By.CSS_SELECTOR, "#decisions-table tbody .open").click()
            wait_for(lambda: page.find_elements(By.CSS_SELECTOR, ".detail .inner"), "the explanation is shown")
            explain(page, request)
            whole(page, folder / "dashboard-dark.png")
            viewport(page, 1440, 900)
            open_page(page, world, theme="light")
            page.save_screenshot(str(folder / "dashboard.png"))
            viewport(page, 390, 844, mobile=True, scale=2)
            open_page(page, world, theme="light")
            page.save_screenshot(str(folder / "dashboard-phone.png"))
        viewport(page, 1440, 1000)
        with World([f"vllm-{n:03d}" for n in range(128)], blocks=400, past=900) as world:
            traffic(world, steps=450, chats=200, each=3.0)
            open_page(page, world, theme="dark")
            page.save_screenshot(str(folder / "dashboard-128.png"))
    finally:
        page.quit()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
