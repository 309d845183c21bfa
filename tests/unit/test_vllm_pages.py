"""Blocks to payloads and back, byte by byte, whatever the order of the engine's tensors is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.clients import Client, WriterGroup
from blobstore.clients.vllm import pages as pages_module
from blobstore.clients.vllm.cache_memory import BlockRuns, DeviceMemory
from blobstore.clients.vllm.identity import Identity, identify
from blobstore.clients.vllm.options import Options
from blobstore.clients.vllm.pages import Pages
from blobstore.errors import InvalidRequest, SizeMismatch
from tests.support.served_store import served_store
from tests.support.vllm_engine import (
    LAYOUTS,
    CacheConfig,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    agreed,
    caches,
    engine,
    installed,
    random_bytes,
    tensors,
    torch,
)

TOKENS = 64
OPTIONS = Options(tokens_per_blob=TOKENS, weights_digest="given")
BLOCKS = [[7, 3, 4, 9]]
"""Of one blob: alone and neighbours, in no order."""


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)


def identity_of(config: CacheConfig, **options: Any) -> Identity:
    return identify(engine("model", **options), config, OPTIONS)


def filled(config: CacheConfig, layout: str = "LBHNC", *, ratio: int = 1, seed: int = 1) -> Any:
    found = tensors(config, layout, ratio=ratio)
    for at, tensor in enumerate(found.values()):
        data = tensor.view(torch.uint8)
        data.copy_(random_bytes(tuple(data.shape), seed + at))
    return found


def empty_spans(pages: Pages) -> list[Any]:
    return [torch.zeros(end - start, dtype=torch.uint8) for start, end in pages.spans]


def told(pages: Pages, blocks: Sequence[Sequence[int]]) -> bytes:
    spans = empty_spans(pages)
    pages.read(blocks, spans)
    return b"".join(span.numpy().tobytes() for span in spans)


def expected(
    identity: Identity, held: dict[str, Any], blocks: list[list[int]], ratio: int
) -> bytes:
    """The payload of one rank, token by token."""
    out = []
    for layer in identity.geometry.layers:
        data = held[layer.name].view(torch.uint8).numpy()
        kernel_tokens = data.shape[2]
        for head in range(data.shape[1]):
            for token in range(TOKENS):
                block, inside = divmod(token, layer.shape.block_tokens)
                small, row = divmod(inside, kernel_tokens)
                out.append(data[blocks[layer.group][block] * ratio + small, head, row].tobytes())
    return b"".join(out)


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to copy; what is for devices does it with tensors of the host here."""
    if request.param == "device":

        def on_device(held: Sequence[Any], n_blocks: int) -> list[Any]:
            return [DeviceMemory(tensor, n_blocks, torch.int32) for tensor in held]

        monkeypatch.setattr(pages_module, "memory_of", on_device)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", [FullAttentionSpec(head_size_v=4), MLAAttentionSpec()])
def test_a_payload_is_in_order_of_layer_head_and_token(layout: str, ratio: int, spec: Any) -> None:
    config = caches(spec)
    held = filled(config, layout, ratio=ratio)
    identity = identity_of(config)
    pages = Pages(identity, config, held)
    assert told(pages, BLOCKS) == expected(identity, held, BLOCKS, ratio)
    assert pages.spans[-1][1] == identity.geometry.layout.nbytes(TOKENS)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_read_can_be_written_elsewhere(layout: str, ratio: int) -> None:
    config = caches(FullAttentionSpec())
    held = filled(config, layout, ratio=ratio)
    pages = Pages(identity_of(config), config, held)
    spans = empty_spans(pages)
    pages.read(BLOCKS, spans)
    before = {name: tensor.view(torch.uint8).clone() for name, tensor in held.items()}
    pages.write([[1, 2, 10, 5]], spans)
    for name, tensor in held.items():
        after = tensor.view(torch.uint8).unflatten(0, (config.num_blocks, ratio))
        old = before[name].unflatten(0, (config.num_blocks, ratio))
        moved = {1: 7, 2: 3, 10: 4, 5: 9}
        for block in range(config.num_blocks):
            assert torch.equal(after[block], old[moved.get(block, block)])


@pytest.mark.usefixtures("memory")
def test_blocks_before_the_first_token_are_left_alone() -> None:
    config = caches(FullAttentionSpec())
    held = filled(config)
    pages = Pages(identity_of(config), config, held)
    ones = [torch.full((end - start,), 1, dtype=torch.uint8) for start, end in pages.spans]
    before = told(pages, [[7, 3, 1, 2]])
    pages.write(BLOCKS, ones, first_token=32)
    assert told(pages, [[7, 3, 1, 2]]) == before
    assert set(told(pages, [[4, 9, 4, 9]])) == {1}


@pytest.mark.usefixtures("memory")
def test_a_window_that_moved_on_is_not_written() -> None:
    config = caches(FullAttentionSpec(), SlidingWindowSpec(block_size=32))
    held = filled(config)
    pages = Pages(identity_of(config), config, held)
    spans = empty_spans(pages)
    pages.read([*BLOCKS, [3, 4]], spans)
    null = {name: tensor[0].view(torch.uint8).clone() for name, tensor in held.items()}
    pages.write([[1, 2, 5, 6], [0, 8]], spans)
    again = empty_spans(pages)
    pages.read([[1, 2, 5, 6], [4, 8]], again)
    for at, (old, new) in enumerate(zip(spans, again, strict=True)):
        one, other = (span.view(2, 2, -1) for span in (old, new))  # heads, halves
        assert torch.equal(one[:, 1], other[:, 1])
        assert torch.equal(one[:, 0], other[:, 0]) or at % 2
    assert all(torch.equal(null[n], tensor[0].view(torch.uint8)) for n, tensor in held.items())


def test_neighbours_are_copied_together() -> None:
    placed = [(0, 5), (1, 6), (3, 7), (4, 8), (5, 1)]
    assert BlockRuns(placed).runs == ((0, 5, 2), (3, 7, 2), (5, 1, 1))
    assert BlockRuns([]).runs == ()


@pytest.mark.usefixtures("memory")
def test_one_layer_of_several() -> None:
    config = caches(FullAttentionSpec(), layers=3)
    held = filled(config)
    pages = Pages(identity_of(config), config, held)
    whole, one = empty_spans(pages), empty_spans(pages)
    pages.read(BLOCKS, whole)
    at = pages.index("model.layers.2.self_attn.attn")
    assert at == 2
    pages.read(BLOCKS, [None, None, one[at]])
    assert torch.equal(one[at], whole[at])
    assert pages.index("another layer") is None


def test_read_only_payloads_can_be_written_from() -> None:
    config = caches(FullAttentionSpec())
    held = filled(config)
    pages = Pages(identity_of(config), config, held)
    payload = np.frombuffer(told(pages, BLOCKS), np.uint8)
    source = [torch.from_dlpack(payload[start:end]) for start, end in pages.spans]
    pages.write([[1, 2, 5, 6]], source)
    assert told(pages, [[1, 2, 5, 6]]) == payload.tobytes()


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ([[7, 3, 4, 12]], "block 12 is none of 1 to 11"),
        ([[7, 3, 4, -1]], "block -1 is none"),
        ([[0, 3, 4, 5]], "block 0 is none"),
        ([[7, 3, 4]], "3 blocks of 16 tokens are no blob of 64"),
        ([*BLOCKS, *BLOCKS], "blocks of 2 groups, there are 1"),
    ],
)
def test_blocks_that_are_none(blocks: list[list[int]], why: str) -> None:
    config = caches(FullAttentionSpec())
    pages = Pages(identity_of(config), config, tensors(config))
    spans = empty_spans(pages)
    with pytest.raises(InvalidRequest, match=why):
        pages.read(blocks, spans)
    with pytest.raises(InvalidRequest, match=why):
        pages.write(blocks, spans)


def test_null_blocks_are_never_read() -> None:
    config = caches(SlidingWindowSpec())
    pages = Pages(identity_of(config), config, tensors(config))
    with pytest.raises(InvalidRequest, match="block 0 is none"):
        pages.read([[0, 3, 4, 5]], empty_spans(pages))


def test_tokens_inside_a_block_and_spans_of_another_size() -> None:
    config = caches(FullAttentionSpec())
    pages = Pages(identity_of(config), config, tensors(config))
    spans = empty_spans(pages)
    with pytest.raises(InvalidRequest, match="token 24 is inside a block of 16"):
        pages.write(BLOCKS, spans, first_token=24)
    with pytest.raises(SizeMismatch, match=r"4095 bytes for model\.layers\.0"):
        pages.write(BLOCKS, [spans[0][1:]])


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ((12, 2, 16, 2, 8), r"torch.bfloat16 \(12, 2, 16, 2, 8\): known are blocks x heads"),
        ((12, 16, 16), "known are blocks x heads"),
        ((12, 16, 2, 16), "for 12 blocks of heads x tokens x bytes 2 x 16 x 32"),
        ((12, 2, 16, 8), "this layout is not known"),
        ((13, 2, 16, 16), "this layout is not known"),
        ((24, 2, 16, 16), "this layout is not known"),
        ((6, 2, 32, 16), "this layout is not known"),
    ],
)
def test_other_layouts(shape: tuple[int, ...], why: str) -> None:
    config = caches(FullAttentionSpec(), layers=1)
    held = {"model.layers.0.self_attn.attn": torch.zeros(shape, dtype=torch.bfloat16)}
    with pytest.raises(InvalidRequest, match=why):
        Pages(identity_of(config), config, held)


def test_tensors_that_are_not_there_or_overlap() -> None:
    config = caches(FullAttentionSpec())
    identity, held = identity_of(config), tensors(config)
    name = next(iter(held))
    folded = held[name][:1].expand(12, 2, 16, 16)
    with pytest.raises(InvalidRequest, match="they overlap"):
        Pages(identity, config, held | {name: folded})
    with pytest.raises(InvalidRequest, match="known are blocks x heads"):
        Pages(identity, config, held | {name: torch.zeros(12, 2, 16, 32)[..., ::2]})
    del held[name]
    with pytest.raises(InvalidRequest, match=f"vLLM gave no cache tensor for {name}"):
        Pages(identity, config, held)


@pytest.fixture
def kv(tmp_path: Path) -> Iterator[Client]:
    with (
        served_store(tmp_path / "socket") as store,
        Client(store.address, timeout_s=20.0) as client,
    ):
        yield client


def spans_of(pages: Pages, payload: memoryview) -> list[Any]:
    flat = np.frombuffer(payload, np.uint8)
    return [torch.from_dlpack(flat[start:end]) for start, end in pages.spans]


@pytest.mark.parametrize("spec", [FullAttentionSpec(max_tp_shards=None), MLAAttentionSpec()])
def test_two_ranks_fill_one_blob(kv: Client, spec: Any) -> None:
    """Each writes its heads; each gets them back; together they are what one rank would write."""
    config = caches(spec, layers=3)
    held = [filled(config, seed=1), filled(config, seed=1 if spec.max_tp_shards else 100)]
    group, keys = WriterGroup("engine"), [b"k" * 32]
    ranks = []
    for rank in range(2):
        identity = agreed(identity_of(config, rank=rank, ranks=2, heads=4), config, 2)
        ranks.append((kv.namespace(identity.bound().namespace, identity.shard), identity))
    results = []
    for (ns, identity), mine in zip(ranks, held, strict=True):
        pages = Pages(identity, config, mine)
        with kv.put(ns, keys, group=group) as writer:
            into = spans_of(pages, writer[0])
            wanted = [span if own else None for span, own in zip(into, pages.written, strict=True)]
            pages.read(BLOCKS, wanted)
            del into, wanted
        results.append(writer.results[0])
    assert results == ["partial", "stored"]
    for (ns, identity), mine in zip(ranks, held, strict=True):
        pages = Pages(identity, config, mine)
        with kv.get(ns, keys) as lease:
            pages.write([[1, 2, 10, 5]], spans_of(pages, lease[0]))
        assert told(pages, [[1, 2, 10, 5]]) == told(pages, BLOCKS)


def test_ranks_together_write_what_one_would() -> None:
    whole_config = caches(FullAttentionSpec(num_kv_heads=4))
    whole = filled(whole_config)
    alone = Pages(identity_of(whole_config, heads=4), whole_config, whole)
    payload = bytearray(alone.spans[-1][1])
    config = caches(FullAttentionSpec(num_kv_heads=2))
    for rank in range(2):
        heads = slice(2 * rank, 2 * rank + 2)
        held = {name: tensor[:, heads] for name, tensor in whole.items()}
        pages = Pages(identity_of(config, rank=rank, ranks=2, heads=4), config, held)
        pages.read(BLOCKS, spans_of(pages, memoryview(payload)))
    assert bytes(payload) == told(alone, BLOCKS)
