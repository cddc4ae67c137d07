"""Keeps secrets out of what the launcher prints and writes.

A name that holds KEY, TOKEN, SECRET or PASSWORD marks its value, and so does the user part of an address. The job's
own secret is never passed to any text but the command that the user copies to the other nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD", re.IGNORECASE)
_ASSIGNMENT = re.compile(
    r"([\w-]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD)[\w-]*=)(\"[^\"]*\"|'[^']*'|[^\s'\",;]+)", re.IGNORECASE
)
_USER = re.compile(r"(\b[\w+.-]+://)[^\s/@'\"]+@")


def is_secret_name(name: str) -> bool:
    """Returns whether the value of a variable or flag called ``name`` must not be shown."""
    return _NAME.search(name) is not None


def redact(text: str) -> str:
    """Returns ``text`` with ``name=value`` of secret names and the user part of addresses hidden.

    Example:
        >>> redact("run --api_key=abc at http://me:pw@host")
        'run --api_key=*** at http://***@host'
    """
    return _USER.sub(rf"\1{HIDDEN}@", _ASSIGNMENT.sub(rf"\1{HIDDEN}", text))


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Returns arguments for display; the word behind a flag with a secret name is hidden as well."""
    shown: list[str] = []
    hide_next = False
    for word in arguments:
        flag = word.startswith("-")
        shown.append(HIDDEN if hide_next and not flag else redact(word))
        hide_next = flag and "=" not in word and is_secret_name(word)
    return shown
