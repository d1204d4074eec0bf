"""A headless Chromium, driven by its DevTools protocol through two pipes: nothing to install beside the browser."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT = 30.0  # seconds, for an answer


def find() -> str | None:
    """The browser on the path, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. What it asks for, complains about and throws is kept in ``requests`` and ``complaints``."""

    def __init__(self, command: str, folder: str) -> None:
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        # The browser reads its commands from descriptor 3 and answers on 4.
        script = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        options = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-gpu",
            "--disable-dev-shm-usage",
        ]
        options += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={folder}"]
        if os.name == "posix" and os.geteuid() == 0:
            options.append("--no-sandbox")  # it cannot have one as root, as in containers
        self._process = subprocess.Popen(
            ["bash", "-c", script, "-", command, *options, "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What a method of the protocol answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(TIMEOUT)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _read(self, timeout: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], timeout)[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise RuntimeError("the browser has gone")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, told: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(" ".join(str(one.get("value")) for one in told["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(told["entry"]["text"])

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 15.0) -> None:
        """Until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.03)

    def resize(self, width: int, height: int, *, dark: bool = False, still: bool = False, scale: float = 1.0) -> None:
        """The size of the window, the theme, and whether the user wants no motion."""
        phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        features = {"prefers-color-scheme": "dark" if dark else "light"}
        features |= {"prefers-reduced-motion": "reduce" if still else "no-preference"}
        media = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=media)

    def open(self, page: Path) -> None:
        """A file, loaded; earlier requests and complaints are forgotten."""
        self.requests.clear()
        self.complaints.clear()
        address = page.resolve().as_uri()
        self.call("Page.navigate", url=address)
        self.wait(f"location.href === {json.dumps(address)} && document.readyState === 'complete'")

    def mouse(self, kind: str, x: float, y: float) -> None:
        """mousePressed, mouseMoved or mouseReleased, with the left button."""
        pressed = 0 if kind == "mouseReleased" else 1
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=pressed, clickCount=1)

    def press(self, key: str, shift: bool = False) -> None:
        """A key, down and up."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        codes |= {"Home": 36, "End": 35, "Delete": 46, "PageUp": 33}
        code = codes.get(key, ord(key[0]))
        text = {"text": key} if len(key) == 1 else {}
        options = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **options, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def picture(self, whole: bool = False) -> bytes:
        """What is seen, as a PNG; the whole page or the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def close(self) -> None:
        """End the browser, and what it has started."""
        with contextlib.suppress(OSError, RuntimeError, TimeoutError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._in)
        os.close(self._out)


@contextlib.contextmanager
def start() -> Iterator[Browser]:
    """A browser of its own, with a profile of its own, until the block ends."""
    command = find()
    if command is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is on the path")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(command, folder)
        try:
            yield browser
        finally:
            browser.close()
