"""What does not work is said once, and never raised into the engine."""

from __future__ import annotations

import logging

import pytest

from blobstore.clients.vllm.faults import Faults


def test_a_fault_is_said_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    faults = Faults()
    for reason in ("", "late", "late", "gone", "", "late"):
        faults.note("saves", reason)
    assert [record.message for record in caplog.records] == [
        "saves: late", "saves: works again", "saves: late",
    ]  # fmt: skip


def test_what_must_not_raise_is_said_once_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def divided(by: int) -> float:
        return 1 / by

    faults = Faults()
    assert faults.guarded(-1.0, divided, 2) == 0.5
    assert caplog.records == []
    for _ in range(3):
        assert faults.guarded(-1.0, divided, by=0) == -1.0
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "divided failed" in record.getMessage()
    assert "ZeroDivisionError" in caplog.text
    assert faults.guarded("other", lambda: str([][0])) == "other"
    assert len(caplog.records) == 2


def test_an_interrupt_is_no_fault() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Faults().guarded(None, interrupted)
