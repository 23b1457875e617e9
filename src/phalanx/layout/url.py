"""URLs with secrets: their printable form, and the options that a connection needs.

A password and the secret values of a query are removed from a URL when it is read.
References to environment variables, `${NAME}`, replace them; a user may write these
too. So everything that prints, logs or saves a URL gets text without its secrets, and
no writer has to think of it.
"""

import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

HIDDEN = "***"
# Prefix of the variables that stand for secrets written in the URL.
PREFIX = "PHALANX_REMOTE_"
SHORT = 4  # characters; shorter secrets are only hidden inside URLs

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# A URL that was normalized as a path has one slash. In running text it ends at white
# space, quotes and brackets.
_BEGIN = r"([A-Za-z][A-Za-z0-9+.-]*:)(//?)"
_IN_TEXT = re.compile(rf"""{_BEGIN}([^\s"'<>\\]+)""")
_ANYWHERE = re.compile(rf"{_BEGIN}(.+)", re.DOTALL)
_QUERY = re.compile(r"([?&#;])([^=&#;?]*)=([^&#;]*)")
_SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|sig|credential|key|auth|sas|session|jwt",
    re.IGNORECASE,
)
# A value that looks like a key, whatever its name.
_SECRET_VALUE = re.compile(
    r"(?=.*[0-9])(?=.*[A-Za-z])[A-Za-z0-9+/_=.%~-]{24,}"
)
# These end the host for the library that splits a URL, or it refuses them.
_UNSAFE = re.compile(r"[/?#\[\]]")


class _Parts(NamedTuple):
    """The part of a URL after its scheme, split at the password."""

    user: str
    password: str | None  # None if the URL has none
    after: str  # the host, the path and the query


def redacted(text: str, *, whole: bool = False) -> str:
    """The text with the secrets of all URLs hidden.

    With `whole`, a URL extends to the end of the text, across white space and quotes.
    """
    # The most frequent case: text without a URL.
    if ":/" not in text:
        return text
    pattern = _ANYWHERE if whole else _IN_TEXT
    return pattern.sub(_hidden, text)


def _hidden(match: re.Match[str]) -> str:
    scheme, slashes, rest = match.groups()
    user, password, after = _split(rest)
    # Running text was cut inside the password, so no "@" ends it.
    if password is None and slashes == "//" and (cut := _cut_password(rest)):
        # The end of the URL is missing: the text was cut in the middle of a password.
        return f"{scheme}{slashes}{rest[: -len(cut)]}{HIDDEN}"
    if password is not None:
        user += f":{_hide(password)}@"
    # Secrets of a query are hidden by their names, or if they look like a key.
    return scheme + slashes + user + _QUERY.sub(_hide_value, after)


def _hide(secret: str) -> str:
    """The mask of a secret. References to variables stay."""
    # Only references: nothing secret is in the text.
    return HIDDEN if _REFERENCE.sub("", secret) else secret


def _hide_value(match: re.Match[str]) -> str:
    mark, name, value = match.groups()
    return f"{mark}{name}={_hide(value) if _is_secret(name, value) else value}"


def _is_secret(name: str, value: str) -> bool:
    if not value:
        return False
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.fullmatch(value))


def _split(rest: str) -> _Parts:
    """Split a URL after the scheme; its password may have any characters."""
    # Everything up to the path: user, password, host and port.
    authority = _authority(rest)
    # The last "@": a password may contain one.
    at = authority.rfind("@")
    if at < 0 and _after_host(authority):
        # `user:pass/word@host`: the text after the colon is no port, so it is a
        # password.
        at = rest.rfind("@")
    # "user:password" -> both; a user alone is no secret.
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
    """The text after a host's colon if it cannot be a port, or ""."""
    # The name of an S3 access point, which is full of colons.
    if authority.startswith("arn:"):
        return ""
    # "[::1]:9000": colons inside brackets belong to the address.
    _, _, port = re.sub(r"^\[[^\]]*\]", "", authority).partition(":")
    return "" if port.isdigit() else port


class Url(str):
    """A URL in printable form, with references in place of its secrets.

    `secrets` holds the secrets written in the URL, by the names of the variables that
    stand for them. They travel with the object to other processes, but no further: a
    copy made for writing (`dataclasses.asdict`) has none.
    """

    secrets: dict[str, str]

    def __new__(cls, text: str) -> "Url":
        # A URL that was read already keeps its secrets.
        if isinstance(text, Url):
            return text
        shown, secrets = _without_secrets(text)
        url = super().__new__(cls, shown)
        url.secrets = secrets
        return url

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        # A deep copy is made for writing, and has no secrets.
        return str(self)

    @property
    def unset(self) -> list[str]:
        """The variables that the URL refers to but that have no value."""
        return [name for name, value in self._values().items() if not value]

    def connection(self) -> tuple[str, dict[str, str]]:
        """The URL with its secrets, and options for the library that opens it.

        A password that would end the host is passed as an option.
        """
        scheme, separator, rest = self.partition("://")
        user, password, after = _split(rest)
        if password is None:
            return self._filled(str(self)), {}
        secret = self._filled(password)
        begin, end = (
            self._filled(f"{scheme}{separator}{user}"),
            self._filled(after),
        )
        # A "/" or "#" in a password would end the host.
        if _UNSAFE.search(secret):
            return f"{begin}@{end}", {"password": secret}
        return f"{begin}:{secret}@{end}", {}

    def masked(self, text: str) -> str:
        """Another program's text about this URL, such as an error, without its secrets."""
        # Long secrets first: a short one may be part of another.
        for secret in sorted(self._values().values(), key=len, reverse=True):
            if len(secret) >= SHORT:
                text = text.replace(secret, HIDDEN)
        return redacted(text)

    def _values(self) -> dict[str, str]:
        """The value of each variable that the URL refers to, or ""."""
        names = dict.fromkeys(_REFERENCE.findall(self))
        return {
            name: self.secrets.get(name) or os.environ.get(name, "")
            for name in names
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
        # References that the user wrote stay.
        if not _REFERENCE.sub("", secret):
            return secret
        names = _numbered(PREFIX + re.sub(r"\W", "_", name).upper())
        # A second password of the same name gets a number.
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
    """Yield the name, and then the name with numbers appended."""
    yield name
    for number in range(2, 1 << 16):
        yield f"{name}_{number}"
