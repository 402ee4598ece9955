"""Chromium without a window, by its DevTools protocol: JSON messages, each with a zero byte after it, in two pipes."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """The one page of a browser. `errors`: what its console has of errors and exceptions."""

    def __init__(self, ask: int, answers: int) -> None:
        self.ask, self.answers, self.errors = ask, os.fdopen(answers, "rb"), list[Any]()
        self.number, self.session = 0, dict[str, str]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params, **self.session}
        os.write(self.ask, json.dumps(message).encode() + b"\0")
        while True:
            answer = json.loads(b"".join(iter(lambda: self.answers.read(1), b"\0")))
            if answer.get("id") == self.number:
                return dict(answer["result"])
            event = answer.get("params", {})
            if "exceptionDetails" in event or "error" in (event.get("type"), event.get("entry", {}).get("level")):
                self.errors.append(event)

    def show(self, address: str, width: int, *, dark: bool = False) -> None:
        """Open a page of this width, on a phone if it is narrow, and wait until its body is marked as drawn."""
        phone = width < 600
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        end = time.monotonic() + 60
        while not self.value("document.readyState === 'complete' && document.body.classList.contains('drawn')"):
            assert time.monotonic() < end, f"{address} is not drawn: {self.errors}"
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        options = {"returnByValue": True, "awaitPromise": True}
        return self.call("Runtime.evaluate", expression=expression, **options)["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with one page, which reads its file 3 and writes to 4, and ends with these."""
    (read, ask), (answers, write) = os.pipe(), os.pipe()
    options = (
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
        "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
        "--disable-sync",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        shell = ["bash", "-c", f'"$@" 3<&{read} 4>&{write}', "", str(CHROMIUM), *options, f"--user-data-dir={home}"]
        process = subprocess.Popen(shell, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        try:
            yield Page(ask, answers)
        finally:
            os.close(ask)
            process.wait(20)
