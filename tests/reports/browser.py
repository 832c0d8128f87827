"""Opens pages in headless Chromium over its DevTools protocol, and finds what is wrong with them."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*"),
)


class Browser:
    """One page of a running Chromium."""

    def __init__(self, port: int) -> None:
        import urllib.request

        from websocket import create_connection

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            target = next(page for page in json.load(answer) if page["type"] == "page")
        self.socket = create_connection(target["webSocketDebuggerUrl"], timeout=60, max_size=None)
        self.number = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, page: Path | str, width: int = 1400, mode: str = "light", height: int = 900) -> list[str]:
        """Opens a file or an address, and returns its problems: errors, requests to others, and too wide parts."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": mode}])
        self.events.clear()
        self.call("Page.navigate", url=_address(page))
        end = time.monotonic() + 30
        while self.evaluate("document.documentElement?.dataset.drawn ?? document.readyState") != "true":
            assert time.monotonic() < end, f"{page} was not drawn: {self.problems(page)}"
            time.sleep(0.05)
        self.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
        time.sleep(0.3)
        return self.problems(page)

    def problems(self, page: Path | str) -> list[str]:
        found = []
        for event in self.events:
            values = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(values["exceptionDetails"])[:500])
            elif event["method"] == "Runtime.consoleAPICalled" and values["type"] in ("error", "warning"):
                found.append(json.dumps(values["args"])[:500])
            elif event["method"] == "Log.entryAdded" and values["entry"]["level"] in ("error", "warning"):
                found.append(json.dumps(values["entry"])[:500])
            elif event["method"] == "Network.requestWillBeSent":
                url = values["request"]["url"]
                is_own = url.split("#")[0] == _address(page) or (isinstance(page, str) and url.startswith(page))
                if not url.startswith("data:") and not is_own:
                    found.append(f"request: {url}")
        overflow = self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        if overflow > 0:
            found.append(f"the page is {overflow} pixels too wide")
        return found

    def screenshot(self, path: Path) -> None:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12000), "scale": 1}
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(image["data"]))


def _address(page: Path | str) -> str:
    return page if isinstance(page, str) else page.resolve().as_uri()


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A Chromium of this test, which ends with it."""
    process = subprocess.Popen(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        port_file, end = profile / "DevToolsActivePort", time.monotonic() + 60
        while not port_file.is_file() or len(port_file.read_text().splitlines()) < 2:
            assert time.monotonic() < end, "Chromium did not start"
            time.sleep(0.05)
        yield Browser(int(port_file.read_text().splitlines()[0]))
    finally:
        process.terminate()
        process.wait(20)
