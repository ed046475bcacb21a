"""The trust file: what OpenSSH reads, read the same way; ssh-keygen is the oracle."""

import subprocess
import time
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.bundle import sshsig
from capsule.bundle.allowed_signers import matches, parse_allowed_signers
from capsule.bundle.sshsig import NAMESPACE

MESSAGE = b"message"
NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def key(alice) -> str:
    return alice.public.openssh().strip()


def stamp(days: int) -> str:
    return (NOW + timedelta(days=days)).strftime("%Y%m%d%H%M%SZ")


# Principals, options, and whether alice@lab may sign a bundle with this line.
LINES = {
    "plain": ("alice@lab", "", True),
    "other principal": ("bob@lab", "", False),
    "list": ("bob@lab,alice@lab", "", True),
    "pattern": ("*@lab", "", True),
    "one letter": ("alic?@lab", "", True),
    "one letter too many": ("alice?@lab", "", False),
    "no character class": ("[a]lice@lab", "", False),
    "negated": ("*@lab,!alice@lab", "", False),
    "negated first": ("!alice@lab,*@lab", "", False),
    "another negated": ("*@lab,!bob@lab", "", True),
    "only negated": ("!bob@lab", "", False),
    "upper case": ("ALICE@LAB", "", False),
    "quoted principals": ('"alice@lab"', "", True),
    "our namespace": ("alice@lab", f'namespaces="{NAMESPACE}"', True),
    "namespaces": ("alice@lab", f'namespaces="git,{NAMESPACE}"', True),
    "namespace pattern": ("alice@lab", 'namespaces="capsule-*"', True),
    "namespace negated": ("alice@lab", f'namespaces="*,!{NAMESPACE}"', False),
    "other namespace": ("alice@lab", 'namespaces="git"', False),
    "no namespace": ("alice@lab", 'namespaces=""', False),
    "option in capitals": ("alice@lab", 'NAMESPACES="git"', False),
    "valid": ("alice@lab", f'valid-after="{stamp(-9)}",valid-before="{stamp(9)}"', True),
    "expired": ("alice@lab", f'valid-before="{stamp(-9)}"', False),
    "not yet valid": ("alice@lab", f'valid-after="{stamp(9)}"', False),
    "a day": ("alice@lab", 'valid-after="20200101"', True),
    "minutes": ("alice@lab", 'valid-before="202001011200"', False),
    "two options": ("alice@lab", f'valid-before="{stamp(9)}",namespaces="git"', False),
    "quote in a value": ("alice@lab", r'namespaces="a\"b,capsule-*"', True),
    "space in a value": ("alice@lab", 'namespaces="a b,capsule-*"', True),
}


def ssh_keygen_accepts(line: str, folder, identity: str = "alice@lab") -> bool:
    (folder / "allowed").write_text(line + "\n")
    command = ["ssh-keygen", "-Y", "verify", "-f", "allowed", "-I", identity, "-n", NAMESPACE]
    done = subprocess.run([*command, "-s", "sig"], cwd=folder, input=MESSAGE, capture_output=True)
    return done.returncode == 0


@pytest.mark.parametrize("name", LINES)
def test_what_openssh_takes_from_a_line_we_take(name, key, alice, tmp_path):
    principals, options, expected = LINES[name]
    line = " ".join(part for part in (principals, options, key) if part)
    (tmp_path / "sig").write_bytes(sshsig.sign(MESSAGE, alice))
    (signer,) = parse_allowed_signers(line)
    assert signer.key == alice.public
    assert (signer.rejection_reason(NAMESPACE, ("alice@lab",), NOW) is None) == expected
    assert ssh_keygen_accepts(line, tmp_path) == expected


def test_times_without_z_are_local(key, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        times = ("20270131", "202701310900", "20270131090000Z", "202701310900UTC")
        found = [
            parse_allowed_signers(f'a valid-after="{text}" {key}')[0].valid_after for text in times
        ]
    finally:
        monkeypatch.undo()
        time.tzset()
    nine = datetime(2027, 1, 31, 9, tzinfo=UTC)
    assert found == [nine - timedelta(hours=18), nine - timedelta(hours=9), nine, nine]


def test_the_bounds_of_a_time_are_inclusive(key):
    noon = datetime(2027, 1, 31, 12, tzinfo=UTC)
    line = f'a valid-after="202701311200Z",valid-before="202702011200Z" {key}'
    (signer,) = parse_allowed_signers(line)
    second, day = timedelta(seconds=1), timedelta(days=1)
    moments = (noon - second, noon, noon + day, noon + day + second)
    said = [signer.rejection_reason(NAMESPACE, (), moment) for moment in moments]
    assert said == [
        "is not valid before 2027-01-31 12:00:00 UTC",
        None,
        None,
        "expired at 2027-02-01 12:00:00 UTC",
    ]


def test_comments_blank_lines_and_other_types_are_passed_by(key, alice):
    text = f"# a comment\n\n  \nbob@lab ssh-rsa AAAA\n\tcarol@lab {key} and a comment\r\n"
    text += 'dave@lab namespaces="git" ecdsa-sha2-nistp384 AAAA\n'
    (signer,) = parse_allowed_signers(text)
    assert (signer.principals, signer.key) == ("carol@lab", alice.public)


REFUSED = {
    "principals only": "alice@lab",
    "no principals": "{key}",
    "certificate authority": "alice@lab cert-authority {key}",
    "certificate authority among others": 'a namespaces="x",cert-authority {key}',
    "unknown option": "alice@lab no-touch-required {key}",
    "unknown option with a value": 'alice@lab verify-required="x" {key}',
    "option without a value": "alice@lab namespaces {key}",
    "value without quotes": "alice@lab namespaces=git {key}",
    "quote that does not end": 'alice@lab namespaces="git {key}',
    "option twice": 'alice@lab namespaces="a",namespaces="b" {key}',
    "comma at the end": 'alice@lab namespaces="a", {key}',
    "two commas": 'alice@lab namespaces="a",,valid-after="20200101" {key}',
    "space between options": 'alice@lab namespaces="a" valid-after="20200101" {key}',
    "time of five digits": 'alice@lab valid-after="20200" {key}',
    "month thirteen": 'alice@lab valid-after="20201301" {key}',
    "time in words": 'alice@lab valid-before="tomorrow" {key}',
    "digits of another script": 'alice@lab valid-before="２０２００１０１" {key}',
    "before is after": 'alice@lab valid-after="20210101",valid-before="20200101" {key}',
    "no key": 'alice@lab namespaces="git"',
    "cut key": "alice@lab ssh-ed25519 AAAA",
    "weak key": f"alice@lab ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAE{'A' * 41}",
    "quoted principals that do not end": '"alice@lab {key}',
}


@pytest.mark.parametrize("name", REFUSED)
def test_lines_that_cannot_be_understood_are_refused(name, key):
    good = f"# one\nalice@lab {key}\n"
    parse_allowed_signers(good)
    with pytest.raises(ValueError, match=r"^line 3: ."):
        parse_allowed_signers(good + REFUSED[name].format(key=key) + "\n")


def test_a_certificate_authority_is_named(key):
    with pytest.raises(ValueError, match="cert-authority is not supported"):
        parse_allowed_signers(f"*@lab cert-authority {key}")


WORDS = st.text(st.sampled_from("ab*?![],."), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=8, max_size=8))
def test_patterns_are_matched_as_openssh_does(tmp_path_factory, key, pairs):
    folder = tmp_path_factory.mktemp("patterns")
    for text, patterns in pairs:
        if text.startswith("-") or patterns.startswith("#"):
            continue
        (folder / "allowed").write_text(f"{patterns} {key}\n")
        command = ["ssh-keygen", "-Y", "match-principals", "-I", text, "-f", "allowed"]
        found = subprocess.run(command, cwd=folder, capture_output=True)
        assert matches(text, patterns) == (found.returncode == 0), (text, patterns)


@settings(max_examples=150)
@given(st.text(max_size=80), st.integers(0, 3))
def test_no_text_gives_anything_but_signers_or_a_reason(key, text, where):
    line = [text, f"{text} {key}", f"alice@lab {text} {key}", f"alice@lab namespaces={text} {key}"]
    try:
        signers = parse_allowed_signers(line[where])
    except ValueError as error:
        assert str(error).startswith("line ")
    else:
        assert all(signer.key.openssh().split()[1] == key.split()[1] for signer in signers)


def test_a_long_pattern_is_matched_in_good_time():
    # By steps, not by the clock: a matcher that backtracks would never come back from this.
    assert not matches("a" * 60, "a*" * 30 + "b")
    assert matches("a" * 60 + "b", "a*" * 30 + "b")
