"""Pages of the server in a browser."""

import asyncio
from collections.abc import Callable
from typing import Any

LAPTOP, PHONE = (1280, 800), (390, 844)
"""Sizes of windows, CSS pixels."""


class Page:
    """A page of the server in the browser; every method runs in a thread, so that the server goes on."""

    def __init__(self, driver: Any, port: int, path: str = "/dashboard") -> None:
        self.driver, self.url = driver, f"http://127.0.0.1:{port}{path}"

    async def do(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(function, *args)

    async def js(self, script: str, *args: Any) -> Any:
        return await self.do(lambda: self.driver.execute_script(script, *args))

    async def open(self, size: tuple[int, int], theme: str) -> None:
        for command, value in (
            (
                "setDeviceMetricsOverride",
                {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 600},
            ),
            ("setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}),
        ):
            await self.do(self.driver.execute_cdp_cmd, f"Emulation.{command}", value)
        await self.do(self.driver.get, self.url)

    async def until(self, script: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """The value of an expression, as soon as it is true."""
        async with asyncio.timeout(timeout_s):
            while not (value := await self.js(f"return {script}", *args)):
                await asyncio.sleep(0.05)
        return value

    async def errors(self) -> list[str]:
        return [entry["message"] for entry in await self.do(self.driver.get_log, "browser")]

    async def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        await self.do(ActionChains(self.driver).send_keys(*keys).perform)
