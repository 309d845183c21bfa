"""Tokens: the file that is made, the file that is given, and who is let in."""

from __future__ import annotations

import errno
import os
from hashlib import sha256
from pathlib import Path

import pytest

from blobstore.errors import SetupError
from blobstore.http.tokens import FILE_NAME, Right, Token, Tokens, load

SECRET = "0123456789abcdef-secret"
DIGEST = sha256(SECRET.encode()).hexdigest()
NOON_S = 1801396800.0
"""2027-01-31T12:00:00Z."""


class Clock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def of_file(home: Path, text: str, clock: Clock | None = None) -> Tokens:
    path = home / "tokens.toml"
    path.write_text(text)
    return load(home, path, clock or Clock())


def entry(**changes: str) -> str:
    fields = {
        "name": '"ci"', "sha256": f'"{DIGEST}"', "rights": '"write"', "namespaces": '["*"]',
    } | changes  # fmt: skip
    return "[[token]]\n" + "".join(f"{k} = {v}\n" for k, v in fields.items() if v)


def test_the_first_start_makes_a_token_with_all_rights(tmp_path: Path) -> None:
    tokens = load(tmp_path, None)
    path = tmp_path / FILE_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text().strip()
    assert len(secret) >= 40
    found = tokens.find([f"Bearer {secret}"])
    assert found is not None
    assert (found.right, found.sees_all) == (Right.ADMIN, True)
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_later_starts_keep_it(tmp_path: Path) -> None:
    load(tmp_path, None)
    first = (tmp_path / FILE_NAME).read_text()
    load(tmp_path, None)
    assert (tmp_path / FILE_NAME).read_text() == first


def test_its_mode_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        load(tmp_path, None)
    finally:
        os.umask(before)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_token_that_others_could_read_is_refused(tmp_path: Path, mode: int) -> None:
    load(tmp_path, None)
    (tmp_path / FILE_NAME).chmod(mode)
    with pytest.raises(SetupError, match="chmod 600"):
        load(tmp_path, None)


@pytest.mark.parametrize("text", ["", "\n", "short\n", "two words of some length\n", "ü" * 30])
def test_a_file_without_a_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SetupError, match=FILE_NAME):
        load(tmp_path, None)


def test_a_directory_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(SetupError, match=FILE_NAME):
        load(tmp_path, None)


@pytest.mark.parametrize(
    "headers",
    [[], [""], ["Bearer"], ["Bearer "], [SECRET], [f"Basic {SECRET}"], [f"Bearer {SECRET}x"],
     [f"Bearer {SECRET}"[:-1]], [f"Bearer {SECRET}", f"Bearer {SECRET}"], [f"Bearer {SECRET} x"],
     [f"Bearer {DIGEST}"], [f"Bearer {SECRET}ü"]],
)  # fmt: skip
def test_who_is_not_let_in(tmp_path: Path, headers: list[str]) -> None:
    assert of_file(tmp_path, entry()).find(headers) is None


@pytest.mark.parametrize("header", [f"Bearer {SECRET}", f"bearer  {SECRET} ", f"BEARER {SECRET}"])
def test_who_is(tmp_path: Path, header: str) -> None:
    assert of_file(tmp_path, entry()).find([header]) == Token("ci", Right.WRITE, ("*",))


def test_a_token_expires_at_its_time(tmp_path: Path) -> None:
    clock = Clock(NOON_S - 0.001)
    tokens = of_file(tmp_path, entry(expires='"2027-01-31T13:00:00+01:00"'), clock)
    assert tokens.find([f"Bearer {SECRET}"]) is not None
    clock.now_s = NOON_S
    assert tokens.find([f"Bearer {SECRET}"]) is None


def test_an_expiry_may_be_a_time_of_toml(tmp_path: Path) -> None:
    tokens = of_file(tmp_path, entry(expires="2027-01-31T12:00:00Z"), Clock(NOON_S))
    assert tokens.find([f"Bearer {SECRET}"]) is None


@pytest.mark.parametrize(
    ("patterns", "model", "seen"),
    [
        (("*",), "any/thing", True),
        (("meta/*",), "meta/llama", True),
        (("meta/*",), "META/llama", False),
        (("meta/*",), "other/meta/x", False),
        (("a", "b*"), "bc", True),
        ((), "a", False),
    ],
)
def test_patterns_are_on_the_models_name(patterns: tuple[str, ...], model: str, seen: bool) -> None:
    assert Token("t", Right.READ, patterns).sees(model) is seen


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "not TOML"),
        ("[tokens]\n", r"\[\[token\]\]"),
        ("token = 3\n", r"\[\[token\]\]"),
        ("token = [3]\n", "number 1: not a table"),
        (entry(name=""), "name"),
        (entry(sha256='"abc"'), "sha256sum"),
        (entry(sha256=f'"{DIGEST.upper()}"'), "lower-case"),
        (entry(rights='"root"'), "'root'"),
        (entry(rights=""), "read, write or admin"),
        (entry(namespaces='"*"'), "list of patterns"),
        (entry(namespaces=""), "list of patterns"),
        (entry(namespaces="[3]"), "list of patterns"),
        (entry(expires='"tomorrow"'), "2027-01-31T12:00:00Z"),
        (entry(expires="2027-01-31T12:00:00"), "zone"),
        (entry(scope='"all"'), "unknown key scope"),
        (entry() + entry(), "another's"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        of_file(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="No such file"):
        load(tmp_path, tmp_path / "none.toml")


def test_files_that_change_are_read_again(tmp_path: Path) -> None:
    tokens = of_file(tmp_path, entry())
    assert tokens.find([f"Bearer {SECRET}"]) is not None
    draft = tmp_path / "draft"
    draft.write_text(entry(rights='"read"'))
    draft.rename(tmp_path / "tokens.toml")
    tokens.refresh()
    found = tokens.find([f"Bearer {SECRET}"])
    assert found is not None
    assert found.right is Right.READ
    (tmp_path / "tokens.toml").write_text("")
    tokens.refresh()
    assert tokens.find([f"Bearer {SECRET}"]) is None


@pytest.mark.parametrize("bad", ["[[token]", "[[token]]\nname = 3\n", None])
def test_a_file_that_became_unusable_changes_nothing(
    tmp_path: Path, bad: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = of_file(tmp_path, entry())
    path = tmp_path / "tokens.toml"
    if bad is None:
        path.unlink()
    else:
        path.write_text(bad)
    for _ in range(3):
        tokens.refresh()
    assert tokens.find([f"Bearer {SECRET}"]) is not None
    assert caplog.text.count("the tokens stay as they were") == 1
    path.write_text(entry(rights='"read"'))
    tokens.refresh()
    found = tokens.find([f"Bearer {SECRET}"])
    assert found is not None
    assert found.right is Right.READ


def test_a_file_that_could_not_be_read_for_a_moment_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = of_file(tmp_path, entry())
    (tmp_path / "tokens.toml").write_text("")
    with monkeypatch.context() as moment:
        moment.setattr(Path, "read_text", _too_many_files)
        tokens.refresh()
    assert tokens.find([f"Bearer {SECRET}"]) is not None
    tokens.refresh()
    assert tokens.find([f"Bearer {SECRET}"]) is None


def _too_many_files(*_: object, **options: object) -> str:
    raise OSError(errno.EMFILE, "Too many open files")


def test_the_default_token_is_another_once_its_file_is(tmp_path: Path) -> None:
    tokens = load(tmp_path, None)
    path = tmp_path / FILE_NAME
    first = path.read_text().strip()
    path.unlink()
    tokens.refresh()
    second = path.read_text().strip()
    assert second != first
    assert tokens.find([f"Bearer {first}"]) is None
    assert tokens.find([f"Bearer {second}"]) is not None
