"""Which job makes which blob: each is made by one, and jobs are runs of consecutive blobs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobstore.rebuild_jobs import Job, Place
from blobstore.text_entry import TextEntry

JOB_BLOBS_MAX = 4096
JOB_TOKENS_MAX = 1 << 18
"""Of one job; what is longer becomes several, one after the other."""


class RebuildMap:
    """Jobs by the blobs that they make."""

    def __init__(self) -> None:
        self._making: dict[tuple[bytes, bytes], Job] = {}
        """By namespace and key."""
        self.nbytes = 0
        """What the texts of all jobs take in memory."""

    def job_of(self, namespace_id: bytes, key: bytes) -> Job | None:
        """The job that makes a blob, if one does."""
        return self._making.get((namespace_id, key))

    def place(self, namespace_id: bytes, key: bytes) -> Place | None:
        """The blob's number there as well."""
        job = self._making.get((namespace_id, key))
        return (job, job.keys.index(key)) if job is not None else None

    def extend(self, job: Job, keys: Sequence[bytes], entries: Sequence[TextEntry], at: int) -> int:
        """Let `job` make blobs from number `at` on that none makes yet too; where that ends."""
        blobs, tokens, end = len(job.keys), job.n_tokens, at
        while end < len(keys) and (job.namespace_id, keys[end]) not in self._making:
            tokens += entries[end].n_tokens
            if blobs and (blobs >= JOB_BLOBS_MAX or tokens > JOB_TOKENS_MAX):
                break
            self._making[job.namespace_id, keys[end]] = job
            blobs, end = blobs + 1, end + 1
        job.keys += keys[at:end]
        job.entries += entries[at:end]
        self.nbytes += _nbytes(entries[at:end])
        return end

    def prepend(self, job: Job, keys: Sequence[bytes], entries: Sequence[TextEntry]) -> None:
        """Let `job` make these first, which none makes yet."""
        n = len(keys)
        job.keys[:0], job.entries[:0] = keys, entries
        self.nbytes += _nbytes(entries)
        self._making.update(((job.namespace_id, key), job) for key in keys)
        for share in job.shares:
            share.first += n
        for other in job.dependants:
            assert other.after is not None
            other.after = (job, other.after[1] + n)
        job.n_kept += n if job.n_kept else 0
        job.n_sealed += n if job.n_sealed else 0  # never less for those who wait

    def shed(self, job: Job) -> None:
        """What nobody wants is not this job's any more: its runner is told to stop there."""
        for key in job.keys[job.told :]:
            self._making.pop((job.namespace_id, key), None)
        self.nbytes -= _nbytes(job.entries[job.told :])
        del job.keys[job.told :], job.entries[job.told :]

    def remove(self, job: Job) -> None:
        """The job makes nothing any more."""
        self.nbytes -= _nbytes(job.entries)
        for key in job.keys:
            if self._making.get((job.namespace_id, key)) is job:
                del self._making[job.namespace_id, key]


def _nbytes(entries: Iterable[TextEntry]) -> int:
    return sum(entry.memory_bytes for entry in entries)


def may_grow(job: Job, at: int, n_tokens: int) -> bool:
    """What continues the job's blob number `at` can be made in the same job, tokens and all."""
    return (
        job.runner is None
        and at == len(job.keys) - 1
        and len(job.keys) < JOB_BLOBS_MAX
        and job.n_tokens + n_tokens <= JOB_TOKENS_MAX
    )


def common_end(job: Job, keys: Sequence[bytes], at: int) -> int:
    """Where the run of `keys` from `at` on ends that `job` makes."""
    first = job.keys.index(keys[at])
    n = 0
    for mine, asked in zip(job.keys[first:], keys[at:], strict=False):
        if mine != asked:
            break
        n += 1
    return at + n
