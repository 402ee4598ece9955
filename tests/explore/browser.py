"""A real Chromium without a window, driven by its DevTools protocol over two pipes."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page. `events` holds all that the browser has reported: requests, messages of the console, exceptions."""

    def __init__(self, profile: Path, size: tuple[int, int] = (1280, 900)) -> None:
        theirs, self.out = os.pipe()
        self.inp, their_out = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += [f"--user-data-dir={profile}", "--remote-debugging-pipe", f"--window-size={size[0]},{size[1]}"]
        words = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{their_out}', "bash", str(PROGRAM), *flags, "about:blank"]
        self.process = subprocess.Popen(words, pass_fds=(theirs, their_out), stderr=subprocess.DEVNULL)
        os.close(theirs)
        os.close(their_out)
        self.last, self.rest, self.session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank", newWindow=True, width=size[0], height=size[1])[
            "targetId"
        ]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **values: Any) -> Any:
        """The result of a command."""
        self.last += 1
        message: dict[str, Any] = {"id": self.last, "method": method, "params": values}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.rest:
                part = os.read(self.inp, 1 << 16)
                assert part, "the browser has ended"
                self.rest += part
            line, _, self.rest = self.rest.partition(b"\0")
            found = json.loads(line)
            if found.get("id") == self.last:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self.events.append(found)

    def open(self, address: str) -> None:
        """Load a page, scripts included."""
        self.call("Page.navigate", url=address)
        self.wait(f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> Any:
        """The value of an expression, as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, (
                f"not within {seconds} s: {script}; {self.run('document.body.innerText')[:500]}"
            )
            time.sleep(0.05)
        return value

    def type(self, text: str) -> None:
        """Type a text and Enter where the focus is."""
        self.call("Input.insertText", text=text)
        enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
        self.call("Input.dispatchKeyEvent", type="keyDown", text="\r", **enter)
        self.call("Input.dispatchKeyEvent", type="keyUp", **enter)

    def choose(self, selector: str, path: Path) -> None:
        """Choose a file in an input."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def reported(self, *methods: str) -> list[Any]:
        """What the browser has reported of some kinds."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.out)
        os.close(self.inp)
