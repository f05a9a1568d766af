"""A headless Chromium: Debian's `chromium` and `chromium-driver`, installed if they are missing and may be."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")


@lru_cache
def programs() -> tuple[str, str]:
    """Paths of browser and driver; skips the test, saying why, where there are none and none can be installed."""
    if not (_browser() and shutil.which("chromedriver")):
        if os.geteuid() or not shutil.which("apt-get"):
            pytest.skip(f"no Chromium with its driver here; on Debian: apt-get install {' '.join(PACKAGES)}")
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], install):
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
            if done.returncode and command is install:
                pytest.skip(f"Chromium cannot be installed: {done.stderr[-300:]}")
    browser, driver = _browser(), shutil.which("chromedriver")
    assert browser is not None
    assert driver is not None
    return browser, driver


def _browser() -> str | None:
    return shutil.which("chromium") or shutil.which("google-chrome")


def start(width: int = 1440, height: int = 1000, scale: float = 1.0) -> webdriver.Chrome:
    browser, driver = programs()
    options = Options()
    options.binary_location = browser
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--no-proxy-server",
        "--hide-scrollbars",
        f"--force-device-scale-factor={scale}",
        f"--window-size={width},{height}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def viewport(page: webdriver.Chrome, width: int, height: int, *, mobile: bool = False, scale: float = 1.0) -> None:
    """Exactly this wide, also below what a window can be."""
    sizes: dict[str, Any] = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)


def colours(page: webdriver.Chrome, scheme: str) -> None:
    """What the system prefers: "light" or "dark", and no motion, so that what is clicked stands still."""
    features = [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
