"""A headless Chromium, driven by the DevTools protocol over one web socket.

https://chromedevtools.github.io/devtools-protocol/. `websockets` comes with uvicorn: no package is
needed beside Chromium itself.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
ADDRESS = re.compile(r"DevTools listening on (ws://\S+)")
PATIENCE_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers, where Chromium refuses its own sandbox
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def at(address: str, **state: str) -> str:
    """The address of a page in this state."""
    return address + "#" + "&".join(f"{key}={value}" for key, value in state.items())


class Navigated(Exception):
    """The page that was asked is gone: another one came in its place before it answered."""


class Browser:
    """One page. `errors`: what it wrote to the console as an error, exceptions that nobody caught,
    and requests to another host than `allowed` or that failed."""

    def __init__(self, folder: Path, width: int = 1440, height: int = 900, dark: bool = False):
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._size, self._dark = (width, height), dark
        self._folder, self._number = folder, 0

    def __enter__(self) -> Browser:
        path = find_browser()
        assert path is not None
        command = [path, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        self._log = self._folder.with_suffix(".log")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self._socket = connect(self._page(self._address()), max_size=None)
        except BaseException:
            self._process.kill()
            raise
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(*self._size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._process.terminate()
        self._process.wait(20)

    def _address(self) -> str:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self._process.poll() is None:
            if match := ADDRESS.search(self._log.read_text(errors="replace")):
                return match[1]
            time.sleep(0.05)
        raise TimeoutError(f"Chromium did not start: {self._log.read_text(errors='replace')}")

    def _page(self, browser: str) -> str:
        """The web socket of a new tab, which is asked for over that of the browser."""
        with connect(browser) as socket:
            create = {"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}
            socket.send(json.dumps(create))
            answer = json.loads(socket.recv(PATIENCE_S))
            while answer.get("id") != 1:
                answer = json.loads(socket.recv(PATIENCE_S))
        return re.sub(r"/devtools/.*", f"/devtools/page/{answer['result']['targetId']}", browser)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command. Events that come before it are noted."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(PATIENCE_S))
            if message.get("id") == self._number:
                if "navigated" in message.get("error", {}).get("message", ""):
                    raise Navigated(f"{method}: {message['error']['message']}")
                assert "error" not in message, (method, message)
                return message["result"]
            self._event(message)

    def _event(self, message: dict[str, Any]) -> None:
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif kind == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        """Loads `url` anew, also where only what follows its # is another."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.call("Page.navigate", url=url)
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = PATIENCE_S) -> None:
        """Until an expression is true; as long as it raises, or the page is changing, it is not."""
        asked = f"(() => {{ try {{ return Boolean({condition}) }} catch {{ return false }} }})()"
        end = time.monotonic() + seconds
        while not self._answers(asked):
            if time.monotonic() > end:
                text = self.evaluate("document.body.innerText.slice(0, 2000)")
                raise TimeoutError(f"{condition} did not come true; {self.errors}; page: {text}")
            time.sleep(0.03)

    def _answers(self, condition: str) -> bool:
        try:
            return self.evaluate(condition)
        except Navigated:
            return False

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def middle(self, selector: str) -> tuple[float, float]:
        """Of an element, which is in sight then."""
        find = f"document.querySelector({json.dumps(selector)})"
        x, y = self.evaluate(
            f"(() => {{ {find}.scrollIntoView({{block: 'nearest'}}); "
            f"const r = {find}.getBoundingClientRect(); "
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        return x, y

    def click(self, selector: str) -> None:
        """With the pointer, in the middle of the element."""
        place = self.middle(selector)
        self.drag(place, place)

    def drag(
        self, begin: tuple[float, float], end: tuple[float, float], button: str = "left"
    ) -> None:
        """Presses a button, goes from one place to another, and lets the button go."""
        self.point(*begin)
        self._mouse("mousePressed", *begin, button=button, clickCount=1)
        if begin != end:
            self._mouse("mouseMoved", *end, button=button)
        self._mouse("mouseReleased", *end, button=button, clickCount=1)

    def key(self, name: str, code: int, text: str = "") -> None:
        """Presses a key and lets it go; `code` is its keyCode, `text` what it types."""
        given = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def point(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y)

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def type(self, selector: str, text: str) -> None:
        """Over what stands in an input."""
        name = json.dumps(selector)
        self.evaluate(f"document.querySelector({name}).focus()")
        self.evaluate(f"document.querySelector({name}).select()")
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """One of a drop-down list."""
        self.evaluate(
            f"(() => {{ const box = document.querySelector({json.dumps(selector)}); "
            f"box.value = {json.dumps(value)}; "
            "box.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
