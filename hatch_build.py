"""Completes the metadata of the wheel: the links of README.md and the URLs of the project are absolute.

Package indexes show the README outside of the repository, where relative links lead nowhere. Set DELAY_PROJECT_URL to
the address of the repository, such as https://github.com/OWNER/NAME, when you build a release; without it the links
stay as they are.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "DELAY_PROJECT_URL"
RELATIVE_LINK = re.compile(r"(!?\[[^\]]*\])\((?!https?:|#|mailto:)([^)\s]+)\)")


class AbsoluteLinks(MetadataHookInterface):
    """Hatchling's hook."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README and the URLs."""
        text, url = (Path(self.root) / "README.md").read_text(), os.environ.get(VARIABLE, "").rstrip("/")
        if url:
            tag = f"v{metadata['version']}"
            text = with_absolute_links(text, url, tag)
            metadata["urls"] = {
                "Homepage": url,
                "Documentation": f"{url}/blob/{tag}/docs/README.md",
                "Changelog": f"{url}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{url}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_absolute_links(text: str, url: str, tag: str) -> str:
    """Return Markdown whose links lead into the repository, and whose pictures are its files."""

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link[1].startswith("!") else "blob"
        return f"{link[1]}({url}/{kind}/{tag}/{link[2]})"

    return RELATIVE_LINK.sub(absolute, text)
