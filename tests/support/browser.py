"""A browser without a screen, spoken to over a pipe (Chrome DevTools Protocol): for tests of what
distsim writes as HTML.

It needs Chromium or Chrome and nothing else; tests skip where there is none. Protocol:
https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PATIENCE_S = 120.0


def browser() -> str | None:
    """The program, or None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One page. ``requests``: addresses that it asked for; ``said``: what it wrote to the console,
    and errors.
    """

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._number, self._left = write, read, 0, b""
        self._session: str | None = None
        self.requests: list[str] = []
        self.said: list[str] = []

    # --- the protocol ---
    def send(self, method: str, **params: Any) -> Any:
        """Say something, and wait for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                if "error" in found:
                    raise AssertionError(f"{method}: {found['error']}")
                return found.get("result", {})

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._left:
            ready, _, _ = select.select([self._read], [], [], max(until - time.monotonic(), 0))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, "the browser says nothing more"
            self._left += chunk
        text, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._heard(found.get("method", ""), found.get("params", {}))
        return found

    def _heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled":
            self.said.append(str([a.get("value", a.get("description")) for a in params["args"]]))
        elif method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])

    def attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    # --- what a person does ---
    def size(self, width: int, height: int, dots: float = 1) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=dots,
            mobile=False,
        )

    def theme(self, name: str, media: str = "") -> None:
        self.send(
            "Emulation.setEmulatedMedia",
            media=media,
            features=[{"name": "prefers-color-scheme", "value": name}],
        )

    def open(
        self, path: Path, ready: str = "document.documentElement?.dataset.ready === 'yes'"
    ) -> None:
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait(ready)

    def run(self, script: str) -> Any:
        """The value of an expression; what is promised is waited for."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(f"{script}: {json.dumps(found['exceptionDetails'])[:1500]}")
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        until = time.monotonic() + _PATIENCE_S
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < until, f"waited for {condition}; the page says {self.said}"
            time.sleep(0.02)

    def key(self, key: str, shift: bool = False) -> None:
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {
            "Enter": 13,
            "Escape": 27,
            "Tab": 9,
            "ArrowLeft": 37,
            "ArrowUp": 38,
            "ArrowRight": 39,
            "ArrowDown": 40,
        }
        given = {
            "key": key,
            "modifiers": 8 * shift,
            "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper())),
        }
        self.send("Input.dispatchKeyEvent", type="keyDown", **given, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", buttons=int(kind == "mousePressed"), clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        for k in range(1, 6):
            x, y = (a + (b - a) * k / 5 for a, b in zip(start, end, strict=True))
            self.mouse("mouseMoved", x, y, button="left", buttons=1)
        self.mouse("mouseReleased", *end, button="left", clickCount=1)

    def picture(self, path: Path, whole: bool = False) -> None:
        """What is to be seen, as PNG."""
        if whole:
            box = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": box["width"], "height": box["height"], "scale": 1}
            data = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)[
                "data"
            ]
        else:
            data = self.send("Page.captureScreenshot")["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def page(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, which is ended with it. ``folder`` takes the browser's
    files.
    """
    program = browser()
    assert program is not None
    child_reads, we_write = os.pipe()
    we_read, child_writes = os.pipe()
    flags = [
        "--headless=new",
        "--remote-debugging-pipe",
        "--no-first-run",
        "--no-default-browser-check",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        f"--user-data-dir={folder / 'profile'}",
        "about:blank",
    ]
    # the browser talks on descriptors 3 and 4
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{child_reads} 4>&{child_writes}', program, *flags]
    process = subprocess.Popen(
        command,
        pass_fds=(child_reads, child_writes),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(child_reads)
    os.close(child_writes)
    found = Page(we_write, we_read)
    try:
        found.attach()
        yield found
    finally:
        with contextlib.suppress(AssertionError, OSError):
            found._session = None
            found.send("Browser.close")
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(we_write)
        os.close(we_read)
