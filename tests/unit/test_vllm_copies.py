"""Between the engine's memory and the arena: in place on the host, over streams on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blobstore.clients.vllm import libraries
from blobstore.clients.vllm.copies import DeviceCopies, HostCopies, copies_for, host_tensor
from blobstore.clients.vllm.identity import identify
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.pages import Pages
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
        from_dlpack=torch.from_dlpack,
    )  # fmt: skip
    monkeypatch.setattr(libraries, "torch", lambda: proxy)
    return fake


def payload_of(copies: HostCopies | DeviceCopies, blocks: list[list[int]]) -> bytes:
    payload = memoryview(bytearray(copies._pages.nbytes))
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
    payload = memoryview(bytearray(pages.nbytes))
    for layer in range(copies.layers):
        copies.out(FROM, payload, layer)()
        done = pages.spans[layer][1]
        assert bytes(payload[:done]) == payload_of(copies, FROM)[:done]


def test_nothing_of_a_payload_is_held_after_a_copy(pages: Pages) -> None:
    """Else the store would publish it from a copy."""
    copies = HostCopies(pages)
    payload = memoryview(bytearray(pages.nbytes))
    copies.out(FROM, payload)()
    payload.release()  # BufferError if anything still looks at it


def test_a_device_gathers_before_the_step_ends_and_crosses_later(
    pages: Pages, cuda: FakeCuda
) -> None:
    copies = DeviceCopies(pages)
    whole = payload_of(HostCopies(pages), FROM)
    payload = memoryview(bytearray(pages.nbytes))
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
