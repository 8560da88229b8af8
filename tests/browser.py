"""A headless Chromium, driven through WebDriver, which is JSON over HTTP."""

import base64
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

# WebDriver's name for the id of an element.
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def missing_programs() -> str:
    return " and ".join(name for name in ("chromium", "chromedriver") if shutil.which(name) is None)


class Browser:
    def __init__(self, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._driver.stdout is not None
        self._url = next(
            f"http://127.0.0.1:{found[1]}"
            for line in self._driver.stdout
            if (found := re.search(r"started successfully on port (\d+)", line))
        )
        arguments = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += ["--no-sandbox"] if os.geteuid() == 0 else []
        arguments += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
        options = {"args": arguments, "binary": shutil.which("chromium")}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._url += f"/session/{session['sessionId']}"
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])

    def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["value"]

    def command(self, name: str, **parameters: Any) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def open(self, url: str) -> None:
        self._send("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        return self._send("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def find(self, selector: str) -> str:
        return self._send("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]

    def type(self, selector: str, text: str) -> None:
        self._send("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._send("POST", f"/element/{self.find(selector)}/click", {})

    def press(self, key: str) -> None:
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._send("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": keys}]})

    def hover(self, selector: str) -> None:
        origin = {_ELEMENT: self.find(selector)}
        move = {"type": "pointerMove", "duration": 0, "origin": origin, "x": 0, "y": 0}
        self._send("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def wait(self, expression: str, seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < end, f"{expression} did not become true"
            time.sleep(0.05)
        return value

    def messages(self) -> list[str]:
        return [entry["message"] for entry in self._send("POST", "/se/log", {"type": "browser"})]

    def save_picture(self, path: Path) -> None:
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._driver.kill()
            self._driver.wait()
            assert self._driver.stdout is not None
            self._driver.stdout.close()
