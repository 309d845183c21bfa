"""Random layouts and namespaces, for property tests."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from blobstore.layer_group import DTYPE_BITS, LayerGroup
from blobstore.layout import KVLayout
from blobstore.namespace import Namespace

repeatable = settings(derandomize=True, deadline=None, max_examples=150)
"""The same examples in every run; noise of the machine is no failure."""

few_layers = st.integers(1, 7)
dtypes = st.sampled_from(sorted(DTYPE_BITS))


@st.composite
def groups(draw: st.DrawFn, heads: st.SearchStrategy[int]) -> LayerGroup:
    """A group of any kind but opaque."""
    layers, n_heads, size = draw(few_layers), draw(heads), 2 * draw(st.integers(1, 8))
    match draw(st.sampled_from(["attention", "latent", "sliding", "state"])):
        case "attention":
            return LayerGroup.attention(
                layers=layers, heads=n_heads, head_size=size, dtype=draw(dtypes)
            )
        case "sliding":
            window = draw(st.integers(1, 200))
            return LayerGroup.sliding(
                layers=layers, heads=n_heads, head_size=size, window=window, dtype=draw(dtypes)
            )
        case "latent":
            return LayerGroup.latent(layers=layers, width=size, dtype=draw(dtypes))
        case _:
            return LayerGroup.state(layers=layers, heads=n_heads, state_bytes=n_heads * size)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """A layout of one to four groups, with head counts that share a grid."""
    heads = draw(st.sampled_from([(8, 4, 2, 1), (12, 6, 2), (16, 8), (3, 1), (1,)]))
    head_groups = draw(st.sampled_from(sorted({1, heads[-1], heads[0]})))
    return KVLayout(
        tuple(draw(st.lists(groups(st.sampled_from(heads)), min_size=1, max_size=4))),
        layers_per_part=draw(st.integers(1, 4)),
        head_groups=head_groups,
        order=draw(st.sampled_from(["layer,kv,token,head", "x"])),
    )


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    """A namespace with any text in its fields."""
    text = st.text(max_size=12)
    some = st.text(min_size=1, max_size=12)
    return Namespace(
        draw(some), draw(layouts()), draw(text), draw(text), draw(some),
        draw(st.integers(1, 1024)), draw(text), draw(text), draw(some),
    )  # fmt: skip
