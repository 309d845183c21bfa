"""Between the engine's memory and the arena: in place on the host, over streams on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blobstore.clients.vllm import libraries
from blobstore.clients.vllm import pages as pages_module
from blobstore.clients.vllm.cache_memory import DeviceMemory
from blobstore.clients.vllm.copies import (
    STAGED_SHARE,
    DeviceCopies,
    HostCopies,
    copies_for,
    host_tensor,
)
from blobstore.clients.vllm.identity import identify
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.pages import Pages
from blobstore.errors import InvalidRequest
from tests.support.vllm_engine import (
    FullAttentionSpec,
    caches,
    engine,
    installed,
    random_bytes,
    tensors,
    torch,
)

TOKENS = 32
DEVICE_BYTES = 1 << 30
FROM, TO = [[3, 7]], [[5, 2]]


class FakeCuda:
    """Streams that do nothing but note, in order, what was done with them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = 0
        self.now = "engine"

    def Stream(self) -> Any:  # noqa: N802
        self.streams += 1
        name = f"stream{self.streams}"
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: self.log.append(f"{name} waits for {event.at}"),
            synchronize=lambda: self.log.append(f"{name} is done"),
        )

    def Event(self) -> Any:  # noqa: N802
        event = SimpleNamespace(at="")

        def record(stream: str) -> None:
            event.at = f"{stream} at {len(self.log)}"
            self.log.append(f"event on {stream}")

        event.record = record
        return event

    def current_stream(self, device: Any) -> str:
        return self.now

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=DEVICE_BYTES)

    def tensor(
        self, numbers: Any, *, dtype: Any, device: Any = "", pin_memory: bool = False
    ) -> Any:
        """As torch's, of which all but an enqueued copy out of pinned memory are waited for."""
        made = torch.tensor(numbers, dtype=dtype)

        def to(device: Any, *, non_blocking: bool = False) -> Any:
            enqueued = pin_memory and non_blocking
            self.log.append(f"{self.now} {'enqueues' if enqueued else 'waits for'} an index")
            return made

        return to(device) if device else SimpleNamespace(to=to)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    return made_pages(monkeypatch)


@pytest.fixture
def pages_there(monkeypatch: pytest.MonkeyPatch) -> Pages:
    """As if the tensors were on a device."""

    def on_device(held: Sequence[Any], n_blocks: int) -> list[DeviceMemory]:
        found = [DeviceMemory(tensor, n_blocks, torch.int32) for tensor in held]
        for memory in found:
            memory._device = SimpleNamespace(type="cuda")
        return found

    monkeypatch.setattr(pages_module, "memory_of", on_device)
    return made_pages(monkeypatch)


def made_pages(monkeypatch: pytest.MonkeyPatch) -> Pages:
    installed(monkeypatch)
    config = caches(FullAttentionSpec(), layers=3)
    identity = identify(
        engine("model"), config, Options(tokens_per_blob=TOKENS, weights_digest="given")
    )
    found = tensors(config)
    for at, tensor in enumerate(found.values()):
        data = tensor.view(torch.uint8)
        data.copy_(random_bytes(tuple(data.shape), at))
    return Pages(identity, config, found)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    proxy = SimpleNamespace(
        cuda=fake, empty=torch.empty, uint8=torch.uint8, frombuffer=torch.frombuffer,
        from_dlpack=torch.from_dlpack, int64=torch.int64, index_select=torch.index_select,
        tensor=fake.tensor,
    )  # fmt: skip
    monkeypatch.setattr(libraries, "torch", lambda: proxy)
    return fake


def nbytes_of(pages: Pages) -> int:
    """Of a whole blob; there is one rank."""
    return pages.spans[-1][1]


def payload_of(copies: HostCopies | DeviceCopies, blocks: list[list[int]]) -> bytes:
    payload = memoryview(bytearray(nbytes_of(copies._pages)))
    copies.out(blocks, payload)()
    return bytes(payload)


def read_only(data: bytes) -> memoryview:
    return memoryview(data).toreadonly()


def test_what_was_set_aside_moves_without_what_other_ranks_write() -> None:
    fake: Any = SimpleNamespace(spans=((0, 4), (4, 8), (8, 11)), written=(True, False, True))
    aside, payload = memoryview(bytes(range(1, 13))), memoryview(bytearray(12))
    HostCopies(fake).move(aside, payload)
    assert payload.tolist() == [1, 2, 3, 4, 0, 0, 0, 0, 9, 10, 11, 0]


def test_the_device_says_which_copies(pages: Pages) -> None:
    assert isinstance(copies_for(pages), HostCopies)
    assert copies_for(pages).layers == 3


def test_what_goes_out_comes_in_again(pages: Pages) -> None:
    copies = HostCopies(pages)
    taken = payload_of(copies, FROM)
    assert taken != payload_of(copies, TO)
    copies.into(TO, read_only(taken), 0, copies.fence())
    assert payload_of(copies, TO) == taken


def test_tokens_before_the_first_are_left_alone(pages: Pages) -> None:
    copies = HostCopies(pages)
    taken, before = payload_of(copies, FROM), payload_of(copies, TO)
    copies.into(TO, read_only(taken), 16, None)
    mixed = payload_of(copies, [[5, 2]])
    assert mixed not in (taken, before)
    copies.into(TO, read_only(taken), 0, None)
    assert payload_of(copies, TO) == taken


def test_layers_one_by_one_are_the_whole(pages: Pages) -> None:
    copies = HostCopies(pages)
    payload = memoryview(bytearray(nbytes_of(pages)))
    for layer in range(copies.layers):
        copies.out(FROM, payload, layer)()
        done = pages.spans[layer][1]
        assert bytes(payload[:done]) == payload_of(copies, FROM)[:done]


def test_nothing_of_a_payload_is_held_after_a_copy(pages: Pages) -> None:
    """Else the store would publish it from a copy."""
    copies = HostCopies(pages)
    payload = memoryview(bytearray(nbytes_of(pages)))
    copies.out(FROM, payload)()
    payload.release()  # BufferError if anything still looks at it


def test_a_device_gathers_before_the_step_ends_and_crosses_later(
    pages: Pages, cuda: FakeCuda
) -> None:
    copies = DeviceCopies(pages)
    whole = payload_of(HostCopies(pages), FROM)
    payload = memoryview(bytearray(nbytes_of(pages)))
    finish = copies.out(FROM, payload)
    assert cuda.log == ["event on engine"]
    assert not any(payload)
    for memory in pages._memory:
        memory._blocks[:] = 0  # type: ignore[attr-defined]  # the next step changes its blocks
    finish()
    assert bytes(payload) == whole
    assert cuda.log[1:] == ["stream1 waits for engine at 0", "stream1 is done"]


def test_a_device_loads_after_the_work_before_it(pages: Pages, cuda: FakeCuda) -> None:
    copies = DeviceCopies(pages)
    taken = payload_of(HostCopies(pages), FROM)
    fence = copies.fence()
    cuda.log.clear()
    copies.into(TO, read_only(taken), 0, fence)
    assert cuda.log == ["stream2 waits for engine at 0", "stream2 is done"]
    assert payload_of(HostCopies(pages), TO) == taken


def test_a_read_only_payload_makes_a_tensor_without_a_warning() -> None:
    data = bytes(range(64))
    assert np.asarray(host_tensor(read_only(data))).tobytes() == data


def test_nothing_makes_the_engine_wait_for_its_device(pages_there: Pages, cuda: FakeCuda) -> None:
    """Indices cross once for a blob, not once for each layer, and behind the work before them."""
    copies = DeviceCopies(pages_there)
    payload = memoryview(bytearray(nbytes_of(pages_there)))
    finish = copies.out(FROM, payload)
    assert cuda.log == ["engine enqueues an index", "event on engine"]
    finish()
    cuda.log.clear()
    copies.into(TO, read_only(bytes(payload)), 0, SimpleNamespace(at="then"))
    assert cuda.log == [
        "stream2 waits for then",
        "stream2 enqueues an index",
        "stream2 enqueues an index",
        "stream2 is done",
    ]
    again = memoryview(bytearray(len(payload)))
    copies.out(TO, again)()
    assert again == payload


@pytest.mark.usefixtures("cuda")
def test_what_waits_to_cross_is_bounded(pages: Pages) -> None:
    copies = DeviceCopies(pages)
    assert copies.staged.most == DEVICE_BYTES // STAGED_SHARE
    copies.staged.most = copies.written_bytes - 1
    payload = memoryview(bytearray(nbytes_of(pages)))
    assert copies.has_room()  # more than there is room for, alone
    finish = copies.out(FROM, payload)
    assert copies.staged.held == copies.written_bytes
    assert not copies.has_room()
    finish()
    del finish
    assert copies.staged.held == 0
    given_up = copies.out(FROM, payload, 1)
    assert copies.staged.held == copies.written_bytes // copies.layers
    assert copies.has_room(0)
    assert not copies.has_room()
    del given_up
    assert copies.staged.held == 0


@pytest.mark.usefixtures("cuda")
def test_what_cannot_be_gathered_holds_nothing(pages: Pages) -> None:
    copies = DeviceCopies(pages)
    with pytest.raises(InvalidRequest):
        copies.out([[0, 0]], memoryview(bytearray(nbytes_of(pages))))
    assert copies.staged.held == 0


def test_on_the_host_there_is_always_room(pages: Pages) -> None:
    copies = HostCopies(pages)
    assert copies.has_room()
    assert copies.has_room(1)
