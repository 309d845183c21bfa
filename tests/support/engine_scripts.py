"""Conversations for the engine of the benches, drawn at random."""

from __future__ import annotations

import random

from blobstore.bench.engine_conversation import Request


def drawn(seed: int, tokens_max: int) -> tuple[Request, ...]:
    """A conversation of a few short turns, with a branch, a pause and a compaction somewhere."""
    rng = random.Random(seed)
    requests = [Request("task", "user", rng.randint(70, tokens_max))]
    n = rng.randint(4, 5)
    pause, branch, compaction = rng.randrange(1, n), rng.randrange(2, n), rng.randrange(2, n)
    for number in range(1, n):
        role, n_tokens = rng.choice(("tool", "user")), rng.randint(10, tokens_max)
        if number == compaction:
            requests.append(Request("compaction", "user", n_tokens, compacts=number - 1))
            continue
        after = rng.randrange(number) if number == branch else number - 1
        requests.append(Request("turn", role, n_tokens, after=after, pause=number == pause))
    return tuple(requests)
