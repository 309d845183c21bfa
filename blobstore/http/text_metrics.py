"""Metrics of what is kept of tokens. Nothing here tells any of them."""

from __future__ import annotations

from blobstore.http.families import One

TEXT_ONES = (
    One("text_entries", "texts.entries", "Blobs whose tokens are kept."),
    One("text_bytes", "texts.bytes", "Bytes that these take, of their quota."),
    One("text_quota_bytes", "texts.quota_bytes", "Bytes that they may take."),
    One("text_kv_bytes", "texts.kv_bytes", "Bytes of the payloads that they stand for."),
    One("text_pending", "texts.pending", "Texts noted that are not on disk yet."),
    One("text_refused_total", "texts.refused", "Texts that are not those of their keys."),
    One("text_damaged_total", "texts.damaged", "Texts that could not be read back."),
    One("text_evicted_total", "texts.evicted", "Texts that went for newer ones, or by age."),
    One("text_not_kept_total", "texts.not_kept", "Texts that there was no room for."),
    One("text_forgotten_total", "texts.forgotten", "Texts that were erased when asked to."),
)
