"""Keeps secrets out of the lines and files of the launcher.

A name that holds KEY, TOKEN, SECRET, PASSWORD, or PASS or UGI as a whole word, marks its value, and so does the
user part of an address. The job's own secret is never passed to any text but the command that the user copies to the
other nodes. Every function takes time in proportion to its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HIDDEN = "***"
_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|(?<![A-Z])(?:PASS|UGI)(?![A-Z])", re.IGNORECASE
)
# A name is looked for where it begins and nowhere inside, or a long one would be read again from each of its letters.
_ASSIGNMENT = re.compile(r"(?<![\w.-])[\w.-]+=")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[\"']?[^\s'\"]+")
_WORD = re.compile(r"[^\s'\"]+")
_ENDLESS = re.compile(r"\S{1000,}")
_SHOWN = 100
_PORT_AND_PATH = re.compile(r"[^/:@]*(?::\d+)?/")


def is_secret_name(name: str) -> bool:
    """Returns whether the value of a variable, flag or property called ``name`` must not be shown.

    Example:
        >>> [is_secret_name(name) for name in ("API_KEY", "hadoop.job.ugi", "dfs.client.pass", "passes")]
        [True, True, True, False]
    """
    return _NAME.search(name) is not None


def redact(text: str) -> str:
    """Returns ``text`` with ``name=value`` of secret names and the user part of addresses hidden.

    Example:
        >>> redact("run --api_key=abc at http://me:pw@host or you:pw@host:2379")
        'run --api_key=*** at http://***@host or ***@host:2379'
    """
    shown = []
    at = 0
    for found in _ASSIGNMENT.finditer(text):
        if found.start() < at or not is_secret_name(found[0]):
            # This match lies in a value that is hidden already.
            continue
        value = _VALUE.match(text, found.end())
        if value is not None:
            shown += [text[at : found.end()], HIDDEN]
            at = value.end()
    text = "".join([*shown, text[at:]])
    return _WORD.sub(lambda word: _without_user(word[0]), text) if "@" in text else text


def one_sentence(error: Exception) -> str:
    """Returns the text of ``error`` for a terminal: without secrets, and only the beginning of an endless word."""
    return _ENDLESS.sub(lambda word: f"{word[0][:_SHOWN]}... ({len(word[0])} characters)", redact(f"{error}"))


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """Returns arguments for display; the word behind a flag with a secret name is hidden as well."""
    shown: list[str] = []
    hide_next = False
    for word in arguments:
        flag = word.startswith("-")
        name, mark, _ = word.partition("=")
        if mark and is_secret_name(name):
            shown.append(f"{redact(name)}={HIDDEN}")
        else:
            shown.append(HIDDEN if hide_next and not flag else redact(word))
        hide_next = flag and not mark and is_secret_name(word)
    return shown


def _without_user(word: str) -> str:
    """Returns a word without the user and password of each address in it."""
    parts = word.split("://")
    if len(parts) == 1:
        start = word.find("=") + 1
        user, colon, _ = word[start:].partition(":")
        return f"{word[:start]}{_after_user(word[start:])}" if colon and "/" not in user else word
    for index in range(1, len(parts)):
        # The rest of the text is one address of etcd, which may name several hosts.
        if parts[index - 1].endswith("etcd"):
            return "://".join([*parts[:index], _after_user("://".join(parts[index:]))])
        user, at, _ = parts[index].rpartition("@")
        if at and not _PORT_AND_PATH.match(user):
            parts[index] = _after_user(parts[index])
    return "://".join(parts)


def _after_user(address: str) -> str:
    _, at, hosts = address.rpartition("@")
    return f"{HIDDEN}{at}{hosts}" if at else address
