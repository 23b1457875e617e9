"""URLs with secrets: what may be written down of one, and what a connection to it needs.

A password and the secret values of a query are taken out of a URL when it is read. In their place
stand references to environment variables, `${NAME}`, as a user may write them too. So everything
that prints, logs or saves a URL has the text without its secrets, and no writer has to think of it.
"""

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

HIDDEN = "***"
# of the variables that stand for secrets that were written out
PREFIX = "PHALANX_REMOTE_"
SHORT = 4  # characters; a shorter secret is only hidden where it stands in a URL

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# A URL that was taken for a path has one slash. In running text it ends at white space, at quotes and
# at brackets.
_BEGIN = r"([A-Za-z][A-Za-z0-9+.-]*:)(//?)"
_IN_TEXT = re.compile(rf"""{_BEGIN}([^\s"'<>\\]+)""")
_ANYWHERE = re.compile(rf"{_BEGIN}(.+)", re.DOTALL)
_QUERY = re.compile(r"([?&#;])([^=&#;?]*)=([^&#;]*)")
_SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|sig|credential|key|auth|sas|session|jwt", re.IGNORECASE
)
# A value that looks like a key, whatever its name is.
_SECRET_VALUE = re.compile(r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/_=.%~-]{24,}")
# What ends the host for the library that splits a URL, or what it refuses.
_UNSAFE = re.compile(r"[/?#\[\]]")


class _Parts(NamedTuple):
    """The part of a URL after its scheme, split around the password."""

    user: str
    password: str | None  # None where the URL has none
    after: str  # the host, the path and the query


def redacted(text: str, *, whole: bool = False) -> str:
    """A text in which the secrets of all URLs are hidden. With `whole` a URL reaches to the end of the
    text, also over white space and quotes."""
    if ":/" not in text:
        return text
    pattern = _ANYWHERE if whole else _IN_TEXT
    return pattern.sub(_hidden, text)


def _hidden(match: re.Match[str]) -> str:
    scheme, slashes, rest = match.groups()
    user, password, after = _split(rest)
    if password is None and slashes == "//" and (cut := _cut_password(rest)):
        # The end of the URL is missing: the text was shortened in the middle of a password.
        return f"{scheme}{slashes}{rest[: -len(cut)]}{HIDDEN}"
    if password is not None:
        user += f":{_hide(password)}@"
    return scheme + slashes + user + _QUERY.sub(_hide_value, after)


def _hide(secret: str) -> str:
    """The mask of a secret; references to variables are none."""
    return HIDDEN if _REFERENCE.sub("", secret) else secret


def _hide_value(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    return f"{mark}{name}={_hide(value) if _is_secret(name, value) else value}"


def _is_secret(name: str, value: str) -> bool:
    if not value:
        return False
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.fullmatch(value))


def _split(rest: str) -> _Parts:
    """The parts of a URL behind its scheme, also where a password has characters that end a host."""
    authority = _authority(rest)
    at = authority.rfind("@")
    if at < 0 and _after_host(authority):
        # `user:pass/word@host`: what stands behind the colon is no port, so it is a password.
        at = rest.rfind("@")
    user, colon, password = rest[: max(at, 0)].partition(":")
    if not colon or not password:
        return _Parts("", None, rest)
    return _Parts(user, password, rest[at + 1 :])


def _cut_password(rest: str) -> str:
    """The text after `user:` in a URL that ends before its host, or ""."""
    if "@" in rest:
        return ""
    tail = _after_host(_authority(rest))
    return rest[len(rest.partition(":")[0]) + 1 :] if tail else ""


def _authority(rest: str) -> str:
    return re.split("[/?#]", rest, maxsplit=1)[0]


def _after_host(authority: str) -> str:
    """The text after a host's colon if it cannot be a port, else ""."""
    # the name of an access point of S3, which is full of colons
    if authority.startswith("arn:"):
        return ""
    _, _, port = re.sub(r"^\[[^\]]*\]", "", authority).partition(":")
    return "" if port.isdigit() else port


class Url(str):
    """A URL as it may be written down: as text it has references in place of its secrets.

    `secrets` are the values that were written out where it was read, by the names of the variables
    that stand for them. They travel with the object to other processes, and no further: a copy that is
    made in order to be written (`dataclasses.asdict`) has none.
    """

    secrets: dict[str, str]

    def __new__(cls, text: str) -> "Url":
        if isinstance(text, Url):
            return text
        shown, secrets = _without_secrets(text)
        url = super().__new__(cls, shown)
        url.secrets = secrets
        return url

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return str(self)

    @property
    def unset(self) -> list[str]:
        """The variables that the URL refers to and that have no value."""
        return [name for name, value in self._values().items() if not value]

    def connection(self) -> tuple[str, dict[str, str]]:
        """The URL with its secrets, and options for the library that opens it: a password that would
        end the host is one."""
        scheme, separator, rest = self.partition("://")
        user, password, after = _split(rest)
        if password is None:
            return self._filled(str(self)), {}
        secret = self._filled(password)
        begin, end = self._filled(f"{scheme}{separator}{user}"), self._filled(after)
        if _UNSAFE.search(secret):
            return f"{begin}@{end}", {"password": secret}
        return f"{begin}:{secret}@{end}", {}

    def masked(self, text: str) -> str:
        """Somebody else's text about this URL, as an error, without its secrets."""
        for secret in sorted(self._values().values(), key=len, reverse=True):
            if len(secret) >= SHORT:
                text = text.replace(secret, HIDDEN)
        return redacted(text)

    def _values(self) -> dict[str, str]:
        """The value of each variable that the URL refers to; "" where there is none."""
        names = dict.fromkeys(_REFERENCE.findall(self))
        return {
            name: self.secrets.get(name) or os.environ.get(name, "") for name in names
        }

    def _filled(self, text: str) -> str:
        values = self._values()
        return _REFERENCE.sub(lambda match: values[match[1]], text)


def _without_secrets(text: str) -> tuple[str, dict[str, str]]:
    """The URL with references in place of its secrets, and the secrets by these names."""
    if "://" not in text:
        return text, {}
    secrets: dict[str, str] = {}

    def referred(name: str, secret: str) -> str:
        if not _REFERENCE.sub("", secret):
            return secret
        names = _numbered(PREFIX + re.sub(r"\W", "_", name).upper())
        free = next(each for each in names if each not in secrets)
        secrets[free] = secret
        return f"${{{free}}}"

    def replaced(match: re.Match[str]) -> str:
        mark, name, value = match.groups()
        return f"{mark}{name}={referred(name, value) if _is_secret(name, value) else value}"

    scheme, separator, rest = text.partition("://")
    user, password, after = _split(rest)
    if password is not None:
        user += f":{referred('password', password)}@"
    return scheme + separator + user + _QUERY.sub(replaced, after), secrets


def _numbered(name: str) -> Iterator[str]:
    """The name, and then with numbers behind it."""
    yield name
    for number in range(2, 1 << 16):
        yield f"{name}_{number}"
