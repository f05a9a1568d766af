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
from tests.dashboard.world import World, wait_for

FOLDER = Path(__file__).parents[2] / "docs" / "images"
WORDS = "the router knows what every engine holds and sends each prompt to the one that can go on from there".split()
SYSTEM = "You are a careful assistant. " + " ".join(WORDS * 6)
QUESTION = "Which engine has this prompt in its cache?"


def traffic(world: World, *, steps: int, chats: int, each: float, seed: int = 7) -> list[dict[str, str]]:
    """Chats that grow turn by turn, over the last quarter of an hour. Returns one of them."""
    draw = random.Random(seed)
    talks: list[list[dict[str, str]]] = [[{"role": "system", "content": SYSTEM if i % 3 else f"Agent {i}. {SYSTEM}"}] for i in range(chats)]
    for step in range(steps):
        ago = 900 - step * 900 / steps
        busy = 0.15 if 0.45 < step / steps < 0.5 else 1.0
        while draw.random() < each * busy / (1 + each * busy):
            talk = talks[draw.randrange(chats)]
            talk.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=draw.randint(12, 60)))})
            if draw.random() < 0.02:
                world.send({"model": "demo", "messages": [{"role": "user", "content": [{"type": "image_url",
                           "image_url": {"url": "http://127.0.0.1/x.png"}}]}]})  # fmt: skip
            elif draw.random() < 0.01:
                world.send({"model": "gpt-unknown", "messages": talk})
            else:
                world.ask(talk)
            talk.append({"role": "assistant", "content": " ".join(draw.choices(WORDS, k=30))})
            if len(talk) > 16:
                del talk[1:]
        if step > 0.96 * steps:
            world.ask(f"{SYSTEM} {step}", serve=False)
        if step % max(1, steps // 450) == 0:
            world.remember(ago)
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
            talk = traffic(world, steps=450, chats=14, each=0.8)
            request = json.dumps({"model": "demo", "messages": [*talk, {"role": "user", "content": QUESTION}]})
            for theme in ("light", "dark"):
                viewport(page, 1440, 1000)
                open_page(page, world, theme=theme)
                page.find_element(By.CSS_SELECTOR, "#decisions-table tbody .open").click()
                wait_for(lambda: page.find_elements(By.CSS_SELECTOR, ".detail .inner"), "the explanation is shown")
                explain(page, request)
                whole(page, folder / f"dashboard-{theme}.png")
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
