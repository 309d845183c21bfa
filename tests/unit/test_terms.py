from __future__ import annotations

import pytest

from blobstore.errors import InvalidRequest
from blobstore.terms import Terms

DEFAULTS = Terms("tokens", "fastest", "accept")


def test_what_is_told_goes_before_what_holds() -> None:
    assert Terms(recall="both").over(DEFAULTS) == Terms("tokens", "both", "accept")
    assert Terms().over(DEFAULTS) == DEFAULTS
    assert DEFAULTS.over(Terms("off", "never", "reject")) == DEFAULTS


def test_only_what_is_told_travels() -> None:
    assert Terms().as_dict() == {}
    told = Terms(text="off", divergence="report")
    assert told.as_dict() == {"text": "off", "divergence": "report"}
    assert Terms.from_dict(told.as_dict()) == told


@pytest.mark.parametrize("name", ["text", "recall", "divergence"])
def test_an_unknown_word_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"{name} must be one of .*, found 'always'"):
        Terms(**{name: "always"})


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"unknown terms: 'keep', 'texts'"):
        Terms.from_dict({"texts": "off", "text": "off", "keep": "all"})
