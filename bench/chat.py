"""Text to token ids and back, with the model's own vocabulary and chat format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.bench.model_file import REMEDY, ModelFile
from blobstore.errors import SetupError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Messages = Sequence[tuple[str, str | list[int]]]
"""A conversation: pairs of a role and a text, or the ids of an answer."""


class Chat:
    """Byte-level BPE, single digits split off, and the turns of a conversation.

    Turns are encoded one by one, so that the ids of a conversation always
    start with the ids of the shorter one that it continues.
    """

    def __init__(self, file: ModelFile) -> None:
        self._tokenizer = _tokenizer(file)

    def turn(self, role: str, content: str) -> list[int]:
        """The ids of one whole turn."""
        return self.encode(f"<|im_start|>{role}\n{content}<|im_end|>\n")

    def ask(self, question: str, role: str = "user") -> list[int]:
        """The ids of a turn, by default a user's, and the opening of the assistant's answer."""
        return self.turn(role, question) + self.encode("<|im_start|>assistant\n")

    def answered(self, ids: Sequence[int]) -> list[int]:
        """The ids that close a generated answer `ids`, its end token given or not."""
        end = self.encode("<|im_end|>")
        closed = list(ids) if list(ids[-1:]) == end else [*ids, *end]
        return closed + self.encode("\n")

    def prompt(self, messages: Messages) -> list[int]:
        """The ids of a conversation, up to where its next answer begins."""
        return list(self._prompt(messages))

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of `text` as it is, special tokens included."""
        return list(self._tokenizer.encode(text).ids)

    def save(self, path: Path) -> None:
        """Write the vocabulary as a tokenizer.json."""
        self._tokenizer.save(str(path))

    def _prompt(self, messages: Messages) -> Iterator[int]:
        for number, (role, content) in enumerate(messages):
            if not isinstance(content, str):
                yield from self.answered(content)
            elif number + 1 == len(messages) or role == "user":
                yield from self.ask(content, role)
            else:
                yield from self.turn(role, content)


def _tokenizer(file: ModelFile) -> Tokenizer:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError as error:
        raise SetupError(f"the tokenizer is missing ({error.name}); {REMEDY}") from error
    tokens: list[str] = file.field("tokenizer.ggml.tokens")
    merges: list[str] = file.field("tokenizer.ggml.merges")
    left_and_right = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=left_and_right)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token in tokens if token.startswith("<|")]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer
