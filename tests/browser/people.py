"""Users with a browser each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page

HOME = "/plugin/delayed-messages"


class People:
    """Opens pages of Airflow for users, each of whom has a browser profile of their own."""

    def __init__(self, browser: Browser, url: str, *, patience_ms: float) -> None:
        self.url = url
        self._browser = browser
        self._patience_ms = patience_ms
        #: Kept over the tests: Airflow's files are in its cache.
        self._profiles: dict[str, BrowserContext] = {}
        self._others: list[BrowserContext] = []

    def open(self, user: str, path: str = "", **options: Any) -> Page:
        """Open a page of the UI, such as ``/messages``, as a user who has signed in; options make another profile."""
        if user not in self._profiles:
            self._profiles[user] = self._new_profile()
            page = self._profiles[user].new_page()
            page.goto(f"{self.url}{HOME}/messages")
            self.sign_in(page, user)
            page.close()
        profile = self._profiles[user]
        if options:
            profile = self._new_profile(storage_state=profile.storage_state(), **options)
            self._others.append(profile)
        page = profile.new_page()
        page.goto(f"{self.url}{HOME}{path}")
        return page

    def open_signed_out(self, path: str = "") -> Page:
        """Open a page of the UI as somebody who has not signed in."""
        self._others.append(self._new_profile())
        page = self._others[-1].new_page()
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
        pages = [page for profile in (*self._profiles.values(), *self._others) for page in profile.pages]
        for number, page in enumerate(pages, 1):
            page.screenshot(path=f"{start}-{number}.png")

    def leave(self) -> None:
        """Close all pages."""
        for profile in self._others:
            profile.close()
        self._others.clear()
        for profile in self._profiles.values():
            for page in profile.pages:
                page.close()

    def _new_profile(self, **options: Any) -> BrowserContext:
        profile = self._browser.new_context(**{"viewport": {"width": 1400, "height": 900}} | options)
        profile.set_default_timeout(self._patience_ms)
        return profile
