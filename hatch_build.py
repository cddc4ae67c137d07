"""The part of the package's metadata that depends on where its repository is: links of the long description, URLs.

Hatchling runs it. ``make dist REPOSITORY=https://HOST/OWNER/NAME`` names the repository; without it, what would link
to a file of the repository becomes plain text, so that no link of an index's page leads nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_FENCED = re.compile(r"(^[ ]*```.*?^[ ]*```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?://)([^)\s]+)\)")
_ATTRIBUTE = re.compile(r'\b(src|srcset|href)="(?!https?://)([^"]+)"')
_VERSION = re.compile(r'__version__ = "(.+)"')


class RepositoryLinks(MetadataHookInterface):
    """Sets ``readme`` and ``urls``, which pyproject.toml lists as dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds both to ``metadata``.

        Raises:
            ValueError: ``REPOSITORY`` is not an https address.
        """
        root = Path(self.root)
        repository = os.environ.get("REPOSITORY", "").rstrip("/")
        if repository and not re.fullmatch(r"https://[^\s/]+/\S+", repository):
            raise ValueError(f"REPOSITORY={repository!r} is no address of a repository: https://HOST/OWNER/NAME")
        found = _VERSION.search((root / "fleet" / "common" / "version.py").read_text(encoding="utf-8"))
        tag = f"v{found[1]}" if found else "main"
        text = long_description((root / "README.md").read_text(encoding="utf-8"), repository, tag)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = project_urls(repository, tag)


def long_description(readme: str, repository: str, tag: str) -> str:
    """Returns ``readme`` with absolute links into ``repository`` at ``tag``, or without them where it has no address.

    Example:
        >>> long_description("See [limits](docs/help/limits.md).", "https://example.org/a/b", "v1.0.0")
        'See [limits](https://example.org/a/b/blob/v1.0.0/docs/limits.md).'
        >>> long_description("See [limits](docs/help/limits.md).", "", "v1.0.0")
        'See limits.'
    """

    def linked(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        text = _LINK.sub(linked, text)  # a picture that is a link
        if not repository:
            return "" if picture else text
        return f"{picture}[{text}]({_address(repository, tag, target, bool(picture))})"

    def attribute(match: re.Match[str]) -> str:
        name, target = match.groups()
        return f'{name}="{_address(repository, tag, target, name != "href") if repository else ""}"'

    parts = _FENCED.split(readme)
    parts[::2] = [_ATTRIBUTE.sub(attribute, _LINK.sub(linked, part)) for part in parts[::2]]
    return "".join(parts)


def _address(repository: str, tag: str, target: str, raw: bool) -> str:
    if target.startswith("#"):
        target = f"README.md{target}"
    return f"{repository}/{'raw' if raw else 'blob'}/{tag}/{target.removeprefix('./')}"


def project_urls(repository: str, tag: str) -> dict[str, str]:
    """Returns the addresses that an index shows beside the text; none where the repository has none."""
    if not repository:
        return {}
    pages = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    files = {name: _address(repository, tag, path, raw=False) for name, path in pages.items()}
    return {"Homepage": repository, **files, "Issues": f"{repository}/issues"}
