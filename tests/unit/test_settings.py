from __future__ import annotations

from typing import Any

import pytest

from blobstore.errors import InvalidRequest
from blobstore.settings import POLICIES, TieringSettings
from blobstore.tiering.plan import POLICY_NAMES


def test_the_policies_that_may_be_chosen_are_those_that_there_are() -> None:
    assert set(POLICIES) == set(POLICY_NAMES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "policy must be one of ours, lru"),
        ({"objective": "fame"}, "objective must be one of tokens, cost"),
        ({"demote_rate": -1}, "demote_rate must be at least 0"),
        ({"promote_rate": -1}, "promote_rate must be at least 0"),
        ({"ssd_writes_per_day": -1}, "ssd_writes_per_day must be at least 0"),
        ({"dram_low": 0.0}, "dram_low must be above 0"),
        ({"dram_low": 0.3, "dram_high": 0.3}, "found 0.3 and 0.3"),
        ({"dram_high": 1.0}, "below 1"),
        ({"ssd_spare": 1.0}, "from 0 to below 1"),
        ({"ssd_spare": float("nan")}, "from 0 to below 1"),
    ],
)
def test_values_out_of_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        TieringSettings(**options)
