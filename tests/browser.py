# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, steered by its DevTools protocol: what a person sees, clicks and types, with scripts or without.

It asks the browser itself, not scripts in the page, so that it works the same where these are switched off.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT = 30.0
"""Seconds any answer is waited for; only a failing test waits that long."""
PHONE, DESK = (390, 844), (1280, 900)
FLAGS = (
    "--no-sandbox",  # which neither root nor most containers can have; it loads nothing but our own pages
    *("--headless=new", "--remote-debugging-port=0", "--no-first-run", "--no-default-browser-check", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--mute-audio", "--password-store=basic", "--disable-features=PasswordLeakDetection"),
)


def program() -> str | None:
    """Where Chromium is, if it is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def running(program: str) -> Iterator[str]:
    """Run a browser, and give the address of its DevTools."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _address(Path(folder) / "DevToolsActivePort", process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # it has children of its own
            process.wait()


def _address(file: Path, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + LIMIT
    while not (file.exists() and file.read_text().count("\n")):
        assert process.poll() is None, "chromium ended at once"
        assert time.monotonic() < end, "chromium did not start"
        time.sleep(0.05)
    port, path = file.read_text().split("\n")[:2]
    return f"ws://127.0.0.1:{port}{path}"


class Tab:
    """One page of the browser. `dialogs` are the questions that were answered with yes, `errors` what went wrong."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._session = socket, ""
        self._number, self._answers = 0, dict[int, asyncio.Future[Any]]()
        self._loaded = asyncio.Event()
        self._reading = asyncio.create_task(self._read())
        self.dialogs: list[str] = []
        self.errors: list[str] = []

    async def ask(self, method: str, **params: Any) -> Any:
        """Ask the browser, and return its answer."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_json({"id": self._number, "method": method, "params": params, **session})
        async with asyncio.timeout(LIMIT):
            return await answer

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if "error" in said:
                    answer.set_exception(AssertionError(said["error"]))
                else:
                    answer.set_result(said["result"])
            else:
                await self._heard(said["method"], said["params"])

    async def _heard(self, event: str, params: Any) -> None:
        if event == "Page.loadEventFired":
            self._loaded.set()
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif event == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            self._number += 1
            self._answers[self._number] = asyncio.get_running_loop().create_future()
            command = {"method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            await self._socket.send_json({"id": self._number, "sessionId": self._session, **command})

    async def open(self, size: tuple[int, int], *, scripts: bool, dark: bool) -> None:
        """Open an empty page in a window of that size, which shares no cookies with others."""
        context = (await self.ask("Target.createBrowserContext", disposeOnDetach=True))["browserContextId"]
        target = (await self.ask("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
        self._session = (await self.ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "DOM", "Log", "Runtime", "Accessibility"):
            await self.ask(f"{domain}.enable")
        width, height = size
        await self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == PHONE,
        )
        await self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.ask("Emulation.setEmulatedMedia", features=[scheme])

    async def close(self) -> None:
        """End the reading; the browser forgets the page."""
        await self._socket.close()
        await self._reading

    async def go(self, url: str) -> None:
        """Load a page."""
        self._loaded.clear()
        await self.ask("Page.navigate", url=url)
        await self._load()

    async def back(self) -> None:
        """Go back in the history, to a page that is loaded again."""
        history = await self.ask("Page.getNavigationHistory")
        self._loaded.clear()
        await self.ask("Page.navigateToHistoryEntry", entryId=history["entries"][history["currentIndex"] - 1]["id"])
        await self._load()

    async def _load(self) -> None:
        async with asyncio.timeout(LIMIT):
            await self._loaded.wait()

    async def nodes(self, selector: str) -> list[int]:
        """Return what a CSS selector finds."""
        root = (await self.ask("DOM.getDocument", depth=0))["root"]["nodeId"]
        return list((await self.ask("DOM.querySelectorAll", nodeId=root, selector=selector))["nodeIds"])

    async def _node(self, selector: str) -> int:
        found = await self.nodes(selector)
        assert found, f"nothing is {selector}"
        return found[0]

    async def html(self, selector: str = "html") -> str:
        """Return the markup of an element."""
        return str((await self.ask("DOM.getOuterHTML", nodeId=await self._node(selector)))["outerHTML"])

    async def click(self, selector: str, *, leads: bool = False) -> None:
        """Click on what a person sees there; where it `leads` to another page, wait for that."""
        node = await self._node(selector)
        await self.ask("DOM.scrollIntoViewIfNeeded", nodeId=node)
        quad = (await self.ask("DOM.getContentQuads", nodeId=node))["quads"][0]
        x, y = sum(quad[0::2]) / 4, sum(quad[1::2]) / 4
        self._loaded.clear()
        for kind in ("mousePressed", "mouseReleased"):
            await self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        if leads:
            await self._load()

    async def write(self, selector: str, text: str) -> None:
        """Write into a field."""
        await self.click(selector)
        await self.ask("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def wider_than_window(self) -> int:
        """Return by how many pixels the page is wider than its window."""
        metrics = await self.ask("Page.getLayoutMetrics")
        return int(metrics["cssContentSize"]["width"] - metrics["cssLayoutViewport"]["clientWidth"])

    async def boxes(self, selector: str) -> list[tuple[float, float, float]]:
        """Return of all that a CSS selector finds the right edge, the width and the height."""
        models = [(await self.ask("DOM.getBoxModel", nodeId=node))["model"] for node in await self.nodes(selector)]
        return [(max(model["border"][::2]), model["width"], model["height"]) for model in models]

    async def accessible(self) -> list[tuple[str, str, bool]]:
        """Return what a screen reader is told: role, name, and whether it has the keyboard's focus."""
        nodes = (await self.ask("Accessibility.getFullAXTree"))["nodes"]
        return [
            (
                node["role"]["value"],
                node.get("name", {}).get("value", ""),
                any(one["name"] == "focused" and one["value"]["value"] for one in node.get("properties", ())),
            )
            for node in nodes
            if not node["ignored"]
        ]

    async def picture(self, file: Path) -> None:
        """Keep a picture of the whole page."""
        taken = await self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))


@asynccontextmanager
async def tab(
    address: str, size: tuple[int, int] = PHONE, *, scripts: bool = True, dark: bool = False
) -> AsyncIterator[Tab]:
    """Give a page of the browser."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        found = Tab(socket)
        try:
            await found.open(size, scripts=scripts, dark=dark)
            yield found
        finally:
            await found.close()
