"""Users with a browser each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page

HOME = "/plugin/delayed-messages"


class People:
    """Opens pages of Airflow for users; each call is another browser profile, as on another machine."""

    def __init__(self, browser: Browser, url: str, *, patience_ms: float) -> None:
        self.url = url
        self._browser = browser
        self._patience_ms = patience_ms
        self._states: dict[str, Any] = {}
        self._contexts: list[BrowserContext] = []

    def open(self, user: str, path: str = "", **options: Any) -> Page:
        """Open a page of the UI, such as ``/messages``, as a user who has signed in before."""
        if user not in self._states:
            page = self.open_signed_out("/messages")
            self.sign_in(page, user)
            self._states[user] = page.context.storage_state()
        page = self._new_page(storage_state=self._states[user], **options)
        page.goto(f"{self.url}{HOME}{path}")
        return page

    def open_signed_out(self, path: str = "", **options: Any) -> Page:
        """Open a page of the UI as somebody who has not signed in."""
        page = self._new_page(**options)
        page.goto(f"{self.url}{HOME}{path}")
        return page

    def sign_in(self, page: Page, user: str) -> None:
        """Fill in the form; the passwords of tests are the names."""
        page.get_by_label("Username").fill(user)
        page.get_by_label("Password").fill(user)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(lambda url: "/auth/" not in url)

    def save_screenshots(self, start: Path) -> None:
        """Save what the browsers show now."""
        start.parent.mkdir(parents=True, exist_ok=True)
        pages = [page for context in self._contexts for page in context.pages]
        for number, page in enumerate(pages, 1):
            page.screenshot(path=f"{start}-{number}.png")

    def leave(self) -> None:
        """Close all browsers."""
        for context in self._contexts:
            context.close()
        self._contexts.clear()

    def _new_page(self, **options: Any) -> Page:
        context = self._browser.new_context(**{"viewport": {"width": 1400, "height": 900}} | options)
        context.set_default_timeout(self._patience_ms)
        self._contexts.append(context)
        return context.new_page()
