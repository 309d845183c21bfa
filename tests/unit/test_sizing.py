from __future__ import annotations

from pathlib import Path

import pytest

from blobstore import host
from blobstore.config import load
from blobstore.errors import InvalidRequest, NotEnough
from blobstore.host import Limit, Memory
from blobstore.sizing import SMALLEST_BYTES, dram_bytes, settings_for, ssd_bytes
from blobstore.units import GIB, MIB


def machine(available_bytes: int, limit_bytes: int | None = None, used_bytes: int = 0) -> Memory:
    limits = () if limit_bytes is None else (Limit(limit_bytes, used_bytes, "memory.max"),)
    return Memory(64 * GIB, available_bytes, 0, 0, limits)


def dram(size: str, memory: Memory) -> int:
    return dram_bytes(load(flags={"dram.size": size}, environ={}), memory)


def test_auto_takes_its_share_of_the_limit_not_of_the_machine() -> None:
    found = dram("auto", machine(32 * GIB, 512 * MIB))
    assert 0.55 * 512 * MIB < found <= 0.6 * 512 * MIB


def test_auto_takes_its_share_of_what_is_available_when_that_is_less() -> None:
    assert dram("auto", machine(GIB, 8 * GIB)) <= 0.6 * GIB
    assert dram("auto", machine(32 * GIB, 2 * GIB, used_bytes=GIB)) <= 0.6 * GIB


def test_auto_refuses_a_machine_that_is_too_small() -> None:
    with pytest.raises(NotEnough, match=r"100 MiB.*64 MiB"):
        dram("auto", machine(32 * GIB, 100 * MIB))


def test_auto_in_a_directory_takes_its_share_of_what_is_free_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda path: 256 * MIB)
    config = load(flags={"dram.directory": tmp_path}, environ={})
    assert dram_bytes(config, machine(32 * GIB)) == 153 * MIB


def test_an_explicit_size_is_kept_to_the_byte() -> None:
    assert dram("12345678", machine(32 * GIB, 512 * MIB)) == 12345678


def test_an_explicit_size_above_the_limit_is_refused_with_both_numbers() -> None:
    with pytest.raises(NotEnough, match=r"600 MiB.*512 MiB \(memory\.max\)"):
        dram("600MiB", machine(32 * GIB, 512 * MIB))


def test_an_explicit_size_above_what_is_available_is_refused_with_both_numbers() -> None:
    with pytest.raises(NotEnough, match=r"2 GiB.*1 GiB"):
        dram("2GiB", machine(GIB))
    with pytest.raises(NotEnough, match=r"400 MiB.*212 MiB"):
        dram("400MiB", machine(32 * GIB, 512 * MIB, used_bytes=300 * MIB))


def test_ssd_auto_counts_what_the_store_holds_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda path: GIB)
    monkeypatch.setattr(host, "used_bytes", lambda path: GIB)
    assert ssd_bytes(load(flags={"store.data": tmp_path}, environ={})) == GIB


def test_ssd_auto_refuses_a_disk_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "free_bytes", lambda path: SMALLEST_BYTES)
    with pytest.raises(NotEnough, match=r"64 MiB free at .*--ssd off"):
        ssd_bytes(load(flags={"store.data": tmp_path}, environ={}))


def test_an_ssd_bound_above_the_disk_is_allowed_and_off_is_none() -> None:
    assert ssd_bytes(load(flags={"ssd.size": "900TiB"}, environ={})) == 900 * 1024 * GIB
    assert ssd_bytes(load(flags={"ssd.size": "off"}, environ={})) == 0


def test_settings_follow_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 8388608 kB\n")
    flags = {
        "store.data": tmp_path,
        "dram.size": "1GiB",
        "dram.huge_pages": "auto",
        "ssd.size": "2GiB",
        "ssd.io_threads": 3,
        "local.lent_max": "10MiB",
        "local.max_clients": 5,
        "times.reservation_s": 7,
        "tiering.policy": "lru2",
        "tiering.demote_rate": "1GB",
        "host.root": tmp_path,
    }
    settings = settings_for(load(flags=flags, environ={}))
    assert settings.data_dir == tmp_path
    assert (settings.dram_bytes, settings.ssd_bytes) == (GIB, 2 * GIB)
    assert (settings.io_threads, settings.max_clients) == (3, 5)
    assert (settings.huge_pages, settings.reservation_ttl_s) == ("auto", 7.0)
    assert settings.staging_quota_bytes == 64 * MIB
    assert (settings.tiering.policy, settings.tiering.demote_rate) == ("lru2", 10**9)
    assert settings.lent_quota_bytes == 10 * MIB
    assert settings.scratch_bytes == (8 * GIB - GIB) // 2


def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    flags = {"dram.size": "64MiB", "dram.staging": "64MiB", "ssd.size": "off"}
    with pytest.raises(InvalidRequest, match="staging_bytes"):
        settings_for(load(flags=flags, environ={}))


def test_watermarks_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    flags = {"store.data": tmp_path, "dram.size": "64MiB", "ssd.size": "off"}
    with pytest.raises(InvalidRequest, match=r"dram_low.*0\.2 and 0\.125"):
        settings_for(load(flags=flags | {"tiering.dram_low": 0.2}, environ={}))
