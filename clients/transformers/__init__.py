"""A cache for Hugging Face transformers: prefixes that any process computed are read, not computed.

    from blobstore.clients.transformers import StoredCache

    cache = StoredCache(kv, model)
    past, n = cache.restore(token_ids)  # a DynamicCache with the first n tokens
    out = model.generate(…, cache=past)
    cache.store(out[0], past)

Needs torch and transformers, which are imported when the first StoredCache is made.
"""

from __future__ import annotations

from blobstore.clients.transformers.stored_cache import StoredCache

__all__ = ["StoredCache"]
