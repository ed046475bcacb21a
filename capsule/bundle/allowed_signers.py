"""The trust file: who may sign, in OpenSSH's form (ssh-keygen(1), "ALLOWED SIGNERS").

One line for each key: principals, options, the key, and a comment. Git and ``ssh-keygen -Y verify``
read the same file. Nothing in it is guessed: an unknown option, a certificate authority or a
malformed date is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase

from capsule.bundle.algorithms import KEY_TYPES
from capsule.bundle.keys import PublicKey, parse_openssh
from capsule.host.errors import CapsuleError

# As in OpenSSH, a backslash escapes a quotation mark and nothing else.
_QUOTED = r'"(?:\\"|[^"\\]|\\(?!"))*"'
_PRINCIPALS = re.compile(r'"([^"]+)"\s+|([^\s"]+)\s+')
_OPTIONS = re.compile(rf'((?:{_QUOTED}|[^\s"])+)\s+')
_OPTION = re.compile(rf"([A-Za-z-]+)(?:=({_QUOTED}))?(?:,(?=.)|$)")
_TIME = re.compile(r"(\d{4})(\d\d)(\d\d)(?:(\d\d)(\d\d)(\d\d)?)?(Z|UTC)?", re.ASCII)
_ANY_TYPE = ("ssh-", "ecdsa-sha2-", "sk-")


@dataclass(frozen=True)
class AllowedSigner:
    """One line of a trust file.

    Attributes:
        principals: Pattern list of the identities that the key belongs to.
        key: The key.
        namespaces: Pattern list of what it may sign, or None for everything.
        valid_after: The first moment at which it counts, or None.
        valid_before: The last moment at which it counts, or None.
    """

    principals: str
    key: PublicKey
    namespaces: str | None = None
    valid_after: datetime | None = None
    valid_before: datetime | None = None

    def identity(self, wanted: tuple[str, ...]) -> str:
        """Name the key's owner: the one of these names among its principals, or all principals."""
        return next((name for name in wanted if matches(name, self.principals)), self.principals)

    def rejection_reason(
        self, namespace: str, identities: tuple[str, ...], now: datetime
    ) -> str | None:
        """Return why the key does not count now for any of these identities, or None."""
        if self.namespaces is not None and not matches(namespace, self.namespaces):
            return f"is not allowed to sign for {namespace}"
        if self.valid_after is not None and now < self.valid_after:
            return f"is not valid before {_show(self.valid_after)}"
        if self.valid_before is not None and now > self.valid_before:
            return f"expired at {_show(self.valid_before)}"
        if identities and not any(matches(identity, self.principals) for identity in identities):
            return (
                f"is listed for {self.principals!a}, not for {' or '.join(map(ascii, identities))}"
            )
        return None


def matches(text: str, patterns: str) -> bool:
    """Match a pattern list (ssh_config(5), PATTERNS): ``*``, ``?``, and ``!`` that overrules."""
    positive = False
    for pattern in patterns.split(","):
        # fnmatch has character classes as well, OpenSSH has none.
        # It does not backtrack over stars, so no pattern takes exponential time.
        if fnmatchcase(text, pattern.removeprefix("!").replace("[", "[[]")):
            if pattern.startswith("!"):
                return False
            positive = True
    return positive


def parse_allowed_signers(text: str) -> tuple[AllowedSigner, ...]:
    """Parse a trust file. Lines with keys of a type that bundles are not signed with are passed by.

    Raises:
        ValueError: What is wrong, and in which line.
    """
    signers = []
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            signer = _parse_line(stripped)
        except (ValueError, CapsuleError) as error:
            reason = error.message if isinstance(error, CapsuleError) else error
            raise ValueError(f"line {number}: {reason}") from error
        if signer is not None:
            signers.append(signer)
    return tuple(signers)


def _parse_line(line: str) -> AllowedSigner | None:
    if (found := _PRINCIPALS.match(line)) is None:
        raise ValueError("the line must consist of principals, options, key type and key")
    principals, rest = found[1] or found[2], line[found.end() :]
    options: dict[str, str] = {}
    # No option begins like a type of key, so this tells whether there are any options.
    if not rest.startswith(_ANY_TYPE):
        if (listed := _OPTIONS.match(rest)) is None:
            raise ValueError("the options are malformed, or no key follows them")
        options, rest = _parse_options(listed[1]), rest[listed.end() :]
    if rest.startswith(_ANY_TYPE) and rest.split()[0] not in KEY_TYPES:
        return None
    try:
        key = parse_openssh(rest)
    except ValueError as error:
        raise ValueError(
            "there is no OpenSSH public key after the principals and options"
        ) from error
    after, before = (_parse_time(options.get(name)) for name in ("valid-after", "valid-before"))
    if after is not None and before is not None and before <= after:
        raise ValueError("valid-before is not after valid-after")
    return AllowedSigner(principals, key, options.get("namespaces"), after, before)


def _parse_options(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    while text:
        if (found := _OPTION.match(text)) is None:
            raise ValueError(f"the options are malformed at {text[:40]!a}")
        name, quoted = found[1].lower(), found[2]
        if name == "cert-authority":
            raise ValueError("cert-authority is not supported: list the signers' own keys")
        if name not in ("namespaces", "valid-after", "valid-before") or quoted is None:
            raise ValueError(f"option {found[1]!a} is unknown or has no quoted value")
        if name in options:
            raise ValueError(f"option {name} is given twice")
        options[name] = quoted[1:-1].replace('\\"', '"')
        text = text[found.end() :]
    return options


def _parse_time(text: str | None) -> datetime | None:
    """Parse YYYYMMDD, YYYYMMDDHHMM or YYYYMMDDHHMMSS, in local time unless Z follows."""
    if text is None:
        return None
    if (found := _TIME.fullmatch(text)) is None:
        raise ValueError(f"{text!a} is not a time like 20270131 or 202701311200Z")
    try:
        moment = datetime(*(int(part or 0) for part in found.groups()[:6]))  # type: ignore[arg-type] # noqa: DTZ001
        return moment.replace(tzinfo=UTC) if found[7] else moment.astimezone()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{text!a} is not a time: {error}") from error


def _show(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
