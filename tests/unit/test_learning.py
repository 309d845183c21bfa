"""When a classifier is fitted anew, and what is kept over restarts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from blobstore.tiering import learning as module
from blobstore.tiering.learning import SAVE_EVERY_S, Learning, Method
from blobstore.tiering.model_file import save_model
from blobstore.tiering.policy import Use
from tests.support.stand_in_learner import METHOD, StandInLearner

NOW_S = 1000.0


class _Run:
    """One life of a node."""

    def __init__(self, path: Path | None, method: Method = METHOD) -> None:
        self.learner: StandInLearner[int] = StandInLearner(lambda item: item)
        self.fits: list[Any] = []
        self.learning = Learning(self.learner, method, path, self.fits.append, inline=True)

    def see(self, n: int, now_s: float = NOW_S) -> None:
        for _ in range(n):
            self.learner.use(Use([1], 1, now_s))
            self.learning.tick(now_s)

    def model(self) -> Any:
        return self.learning.stats(NOW_S)["model"]


def test_a_fit_is_made_when_due_and_adopted() -> None:
    run = _Run(None)
    run.see(10)
    assert run.learner.adopted == []
    run.see(1)
    assert run.learner.adopted == run.fits == [10]
    assert run.learning.fitted == 10
    assert run.learning.stats(NOW_S)["fits"] == 1
    run.learning.close()


def test_without_a_fit_nothing_is_kept_out() -> None:
    run = _Run(None)
    run.learner.odds = 0.01
    assert run.learning.p_reuse([1, 2], NOW_S, 10.0).tolist() == [1.0, 1.0]
    run.see(11)
    assert run.learning.p_reuse([1, 2], NOW_S, 10.0).tolist() == [0.01, 0.01]


def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    run = _Run(tmp_path / "model")
    assert run.model()["source"] == "cold"
    run.see(25)
    run.learning.close()
    again = _Run(tmp_path / "model")
    assert again.learner.adopted == again.fits == [20]
    assert again.model() == {"source": "warm", "why": "", "age_s": None}


def test_a_model_is_saved_now_and_then_not_at_every_fit(tmp_path: Path) -> None:
    path = tmp_path / "model"
    run = _Run(path)
    run.see(11)
    first = path.read_bytes()
    run.see(30, NOW_S + 10)
    assert path.read_bytes() == first
    run.see(1, NOW_S + SAVE_EVERY_S)
    assert path.read_bytes() != first


def test_saving_goes_on_when_the_clock_jumps_back(tmp_path: Path) -> None:
    path = tmp_path / "model"
    run = _Run(path)
    run.see(11, 1e9)
    path.unlink()
    run.see(20, 0.0)
    run.see(1, SAVE_EVERY_S)
    assert path.exists()


def test_a_damaged_model_starts_cold_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model"
    run = _Run(path)
    run.see(11)
    path.write_bytes(path.read_bytes()[:-1])
    again = _Run(path)
    assert again.learner.adopted == []
    assert again.model()["source"] == "cold"
    assert "damaged" in again.model()["why"]
    assert "starts without a model" in caplog.text
    again.see(11)  # and learns, and repairs the file
    again.learning.close()
    assert _Run(path).model()["source"] == "warm"


@pytest.mark.parametrize(
    ("version", "values", "why"),
    [(2, {"kind": "stand-in"}, "version 2"), (1, {"kind": "another"}, "not a stand-in's")],
)
def test_a_model_of_another_kind_starts_cold_and_says_so(
    tmp_path: Path, version: int, values: dict[str, str], why: str
) -> None:
    path = tmp_path / "model"
    save_model(path, version, METHOD.pack(3)[0], values)
    run = _Run(path)
    assert run.learner.adopted == []
    assert why in run.model()["why"]


def test_a_model_without_its_parts_starts_cold(tmp_path: Path) -> None:
    path = tmp_path / "model"
    save_model(path, 1, {}, {"kind": "stand-in"})
    assert _Run(path).model()["source"] == "cold"


def test_a_first_start_is_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        run = _Run(tmp_path / "model")
    assert "no file" in run.model()["why"]
    assert [record.levelno for record in caplog.records] == [logging.DEBUG]


def test_a_disk_that_refuses_the_model_is_said_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_model", refuse)
    run = _Run(tmp_path / "model")
    run.see(31)
    run.learning.close()
    assert run.learner.adopted == [10, 20, 30]
    assert "could not be saved" in caplog.text


def test_fits_that_fail_leave_the_last_one_in_force() -> None:
    fits = iter([1])
    run = _Run(None, Method(1, lambda n: next(fits), METHOD.pack, METHOD.unpack))
    run.see(31)
    assert run.learner.adopted == [1]
    assert run.learning.stats(NOW_S)["fits_failed"] == 1
