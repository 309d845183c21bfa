"""Who may open the local socket: its mode on disk, whatever the umask of the daemon."""

from __future__ import annotations

import stat
from pathlib import Path

from blobstore.local_door import LocalDoor
from blobstore.settings import StoreSettings
from blobstore.store import Store
from blobstore.units import MIB


async def mode_of_socket(tmp_path: Path, uids: list[int]) -> int:
    store = await Store.open(StoreSettings(data_dir=tmp_path, dram_bytes=64 * MIB))
    door = LocalDoor(store, tmp_path / "socket", uids=uids)
    try:
        await door.start()
        return stat.S_IMODE((tmp_path / "socket").stat().st_mode)
    finally:
        await door.close()
        await store.close()


async def test_only_the_daemons_own_user_can_open_its_socket(tmp_path: Path) -> None:
    assert await mode_of_socket(tmp_path, []) == 0o600


async def test_other_users_can_open_the_socket_once_some_are_named(tmp_path: Path) -> None:
    assert await mode_of_socket(tmp_path, [12345]) == 0o666
