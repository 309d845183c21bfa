from __future__ import annotations

import dataclasses
import struct
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.errors import InvalidRequest
from blobstore.fields import pack
from blobstore.keys import Keys
from blobstore.layout import KVLayout, LayerGroup
from blobstore.namespace import Namespace, WriterGroup
from tests.support.identities import namespaces, repeatable
from tests.support.vectors import load, namespace_of

ATTENTION = LayerGroup.attention(layers=2, heads=4, head_size=64)
BASE = Namespace("llama", KVLayout((ATTENTION,)))


def framed(*fields: str | int | bytes) -> bytes:
    """The encoding that docs/FORMAT.md describes, written a second time."""
    encoded = b""
    for field in fields:
        if isinstance(field, int):
            field = struct.pack("<Q", field)
        elif isinstance(field, str):
            field = field.encode()
        encoded += struct.pack("<I", len(field)) + field
    return encoded


def expected_encoding(ns: dict[str, Any]) -> bytes:
    layout = ns["layout"]
    groups = (framed("blobstore/layer-group/1", *group.values()) for group in layout["groups"])
    inner = framed(
        "blobstore/layout/1",
        layout["layers_per_part"], layout["head_groups"], layout["order"], *groups,
    )  # fmt: skip
    return framed(
        "blobstore/namespace/1",
        ns["model"], ns["revision"], ns["weights_digest"], ns["dtype"], inner,
        ns["tokens_per_blob"], ns["adapter"], ns["salt"], ns["hash_scheme"],
    )  # fmt: skip


@pytest.mark.parametrize("case", load("namespaces"), ids=lambda case: case["name"])
def test_vectors(case: dict[str, Any]) -> None:
    namespace, encoded = namespace_of(case["namespace"]), bytes.fromhex(case["encoded"])
    assert namespace.encode() == encoded == expected_encoding(case["namespace"])
    assert namespace.id.hex() == case["id"] == sha256(encoded).hexdigest()
    assert Namespace.decode(encoded) == namespace


def with_group(**fields: Any) -> KVLayout:
    return KVLayout((dataclasses.replace(ATTENTION, **fields),))


HALF = dataclasses.replace(ATTENTION, layers=1)
WINDOWED = KVLayout((LayerGroup.sliding(layers=2, heads=4, head_size=64, window=128),))
WITH_STATE = KVLayout((ATTENTION, LayerGroup.state(layers=1, state_bytes=64)))

VARIANTS: dict[str, dict[str, Any]] = {
    "model": {"model": "llama2"},
    "revision": {"revision": "llama"},
    "weights": {"weights_digest": "llama"},
    "dtype": {"dtype": "fp8"},
    "tokens per blob": {"tokens_per_blob": 128},
    "adapter": {"adapter": "sql@1"},
    "adapter version": {"adapter": "sql@2"},
    "salt": {"salt": "sql@1"},
    "hash scheme": {"hash_scheme": "engine"},
    "stored dtype": {"layout": with_group(dtype="fp16")},
    "layers": {"layout": with_group(layers=4)},
    "heads": {"layout": with_group(heads=8)},
    "head size": {"layout": with_group(head_size=128)},
    "kind": {"layout": WINDOWED},
    "window": {
        "layout": KVLayout((LayerGroup.sliding(layers=2, heads=4, head_size=64, window=64),))
    },
    "another group": {"layout": WITH_STATE},
    "order of groups": {"layout": KVLayout(WITH_STATE.groups[::-1])},
    "state": {"layout": KVLayout((ATTENTION, LayerGroup.state(layers=1, state_bytes=32)))},
    "cut of the state": {
        "layout": KVLayout((ATTENTION, LayerGroup.state(layers=1, state_bytes=64, heads=2)))
    },
    "equal layers in two groups": {"layout": KVLayout((HALF, HALF))},
    "layers per part": {"layout": KVLayout((ATTENTION,), layers_per_part=2)},
    "head groups": {"layout": KVLayout((ATTENTION,), head_groups=2)},
    "order in a part": {"layout": KVLayout((ATTENTION,), order="x")},
    "opaque of equal size": {"layout": KVLayout.opaque(BASE.nbytes)},
    "opaque of another size": {"layout": KVLayout.opaque(BASE.nbytes + 1)},
}  # fmt: skip


def test_any_field_that_differs_gives_another_id_and_other_keys() -> None:
    variants = [BASE, *(dataclasses.replace(BASE, **change) for change in VARIANTS.values())]
    assert len({namespace.id for namespace in variants}) == len(variants)
    own_scheme = [ns for ns in variants if ns.hash_scheme == BASE.hash_scheme]
    keys = [key for ns in own_scheme for key in ns.keys(range(512))]
    assert len(set(keys)) == len(keys) == 2 * len(own_scheme) + 2


def test_every_field_has_a_variant() -> None:
    changed = {name for change in VARIANTS.values() for name in change}
    assert changed == {field.name for field in dataclasses.fields(Namespace) if field.init}


def test_borders_between_fields_count() -> None:
    assert Namespace("ab", BASE.layout, "c").id != Namespace("a", BASE.layout, "bc").id


def test_equal_fields_give_an_equal_id() -> None:
    again = Namespace("llama", KVLayout((dataclasses.replace(ATTENTION),)))
    assert again == BASE
    assert again.id == BASE.id
    assert {again: 1}[BASE] == 1
    assert len(BASE.id) == 32


@repeatable
@given(namespaces())
def test_decoding_gives_the_namespace_back(namespace: Namespace) -> None:
    assert Namespace.decode(namespace.encode()) == namespace


@repeatable
@given(namespaces(), st.data())
def test_damaged_bytes_never_decode_to_something_else_than_they_say(
    namespace: Namespace, data: st.DataObject
) -> None:
    damaged = bytearray(namespace.encode())
    at = data.draw(st.integers(0, len(damaged) - 1))
    cut = data.draw(st.integers(0, 3))
    damaged[at : at + cut] = data.draw(st.binary(max_size=3))
    try:
        decoded = Namespace.decode(bytes(damaged))
    except InvalidRequest:
        return
    assert decoded.encode() == damaged


@repeatable
@given(st.binary(max_size=64))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Namespace.decode(data)
    with pytest.raises(InvalidRequest):
        Namespace.decode(pack(b"blobstore/namespace/1", *[data] * 9))


def test_a_namespace_with_other_fields_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="9 fields, found 10"):
        Namespace.decode(BASE.encode() + framed("more"))


@pytest.mark.parametrize("model", ["org/model", "a@b", " ", "🦙", "../../etc", "nul\0", "x" * 4096])
def test_any_name_will_do(model: str) -> None:
    namespace = dataclasses.replace(BASE, model=model)
    assert Namespace.decode(namespace.encode()).model == model
    assert len(namespace.id) == 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ""}, "model is empty"),
        ({"model": "x" * 4097}, "model takes 4097 bytes, at most 4096"),
        ({"model": "\udfff"}, "model cannot be encoded"),
        ({"model": None}, "model is text, found NoneType"),
        ({"salt": b"x"}, "salt is text, found bytes"),
        ({"dtype": ""}, "dtype is empty"),
        ({"hash_scheme": ""}, "hash_scheme is empty"),
        ({"layout": 4096}, "layout is a KVLayout, found 4096"),
        ({"tokens_per_blob": 0}, "tokens_per_blob is from 1 to 1048576, found 0"),
        ({"tokens_per_blob": 256.0}, "tokens_per_blob is an int"),
        ({"tokens_per_blob": 1 << 20, "layout": with_group(head_size=1 << 20)}, "bytes per blob"),
    ],
)
def test_values_out_of_bounds_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        dataclasses.replace(BASE, **fields)


def test_keys_of_another_scheme_come_from_the_engine() -> None:
    namespace = dataclasses.replace(BASE, hash_scheme="vllm-sha256-cbor")
    with pytest.raises(InvalidRequest, match="'vllm-sha256-cbor' come from the engine"):
        namespace.keys([1] * 256)


def test_keys_are_those_of_its_id_and_blob_length() -> None:
    namespace = dataclasses.replace(BASE, tokens_per_blob=2)
    first = sha256(b"blobstore/key/1\0" + namespace.id + struct.pack("<2I", 5, 6)).digest()
    rest = sha256(b"blobstore/key/1\0" + first + struct.pack("<I", 7)).digest()
    assert namespace.keys([5, 6, 7]) == Keys(first)
    assert namespace.keys([5, 6, 7], tail=True) == Keys(first + rest, tail_tokens=1)


@pytest.mark.parametrize(
    ("id_", "epoch"), [("", 0), ("x" * 257, 0), ("a", -1), ("a", 1 << 63), ("a", True), (7, 0)]
)
def test_writer_groups_are_bounded(id_: Any, epoch: Any) -> None:
    assert WriterGroup("engine-1", 3) == WriterGroup("engine-1", 3) != WriterGroup("engine-1", 4)
    with pytest.raises(InvalidRequest):
        WriterGroup(id_, epoch)
