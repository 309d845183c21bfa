from __future__ import annotations

import copy

import pytest

from blobstore import errors
from blobstore.errors import BY_CODE, BlobStoreError, Retryable, from_code


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=BY_CODE.keys())
def test_every_error_survives_the_wire(kind: type[BlobStoreError]) -> None:
    error = from_code(kind.code, "wanted 4, found 5", 0.25)
    assert type(error) is kind
    assert str(error) == "wanted 4, found 5"
    assert getattr(error, "retry_after_s", None) == (0.25 if issubclass(kind, Retryable) else None)


def test_every_class_has_a_code_of_its_own() -> None:
    classes = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, BlobStoreError)
    }
    assert classes == set(BY_CODE.values())


def test_an_unknown_code_gives_the_root() -> None:
    error = from_code("of a newer daemon", "message")
    assert type(error) is BlobStoreError
    assert str(error) == "message"


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.InvalidRequest, ValueError),
        (errors.SizeMismatch, ValueError),
        (errors.UnknownNamespace, KeyError),
        (errors.DeadlineExceeded, TimeoutError),
        (errors.StorageFailed, OSError),
    ],
)
def test_callers_without_our_names_can_catch_them(
    kind: type[BlobStoreError], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin):
        raise kind("message")


@pytest.mark.parametrize("kind", BY_CODE.values(), ids=BY_CODE.keys())
def test_exit_codes_are_those_of_the_command_line(kind: type[BlobStoreError]) -> None:
    if issubclass(kind, errors.InvalidRequest):
        assert kind.exit_code == 2
    elif issubclass(kind, Retryable):
        assert kind.exit_code == 3
    else:
        assert kind.exit_code == 1


@pytest.mark.parametrize(
    "kind", [kind for kind in BY_CODE.values() if issubclass(kind, Retryable)], ids=lambda k: k.code
)
def test_when_to_retry_can_be_said_and_is_kept_by_copies(kind: type[Retryable]) -> None:
    assert kind("message").retry_after_s > 0
    error = copy.copy(kind("message", retry_after_s=2.5))
    assert (str(error), error.retry_after_s) == ("message", 2.5)
