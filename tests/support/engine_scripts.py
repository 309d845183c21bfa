"""Conversations for the engine of the benches, drawn at random."""

from __future__ import annotations

import random
from itertools import permutations

from blobstore.bench.engine_conversation import Request

_PLACES = tuple(
    (pause, branch, compaction)
    for pause, branch, compaction in permutations(range(1, 5), 3)
    if branch > 1 and compaction in (2, 3) and branch != compaction + 1
)
"""Numbers of requests: a branch leaves one behind, and a compaction is gone on from."""


def drawn(seed: int, tokens_max: int) -> tuple[Request, ...]:
    """A conversation of a few short turns, with a branch, a pause and a compaction among them."""
    rng = random.Random(seed)
    pause, branch, compaction = rng.choice(_PLACES)
    requests = [Request("task", "user", rng.randint(70, tokens_max))]
    for number in range(1, 5):
        role, n_tokens = rng.choice(("tool", "user")), rng.randint(10, tokens_max)
        if number == compaction:
            requests.append(Request("compaction", "user", n_tokens, compacts=number - 1))
            continue
        after = rng.randrange(number - 1) if number == branch else number - 1
        requests.append(Request("turn", role, n_tokens, after=after, pause=number == pause))
    return tuple(requests)
