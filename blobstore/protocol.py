"""The messages between a client and its local daemon.

msgpack arrays, tagged by a small integer, in the frames of transports/framing.
Keys of one call are of equal length and travel packed in one byte string;
extents travel packed as pairs of u64 (offset in the arena, bytes). Blobs never
travel: they are read and written in place. Bytes and test vectors: docs/FORMAT.md.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

VERSION = 1
"""Raised whenever an old client could misread a new daemon, or the reverse."""

NO_EXTENT = (1 << 64) - 1
"""In place of an offset: nothing was lent for this key (`Reserved.reasons` says why)."""

KEYS_MAX = 100_000
"""Keys of one call: bounds its reply, and how long others wait for it."""

TOKENS_MAX = 1 << 20
"""Whose ids go with one call."""

TEXT_BYTES_MAX = 1 << 20
"""Of the caller's text in one request, as UTF-8."""

Count = Annotated[int, msgspec.Meta(ge=0)]
"""A number, position or id. Never negative: Python would count from the end."""


Hints = dict[str, str | int]
"""What is known of the request behind a call, by name: `Hint.as_dict`."""


class Request(msgspec.Struct, array_like=True, gc=False):
    """What a client sends."""


class Reply(msgspec.Struct, array_like=True, gc=False):
    """What the daemon answers."""


class Hello(Request, tag=1):
    """First frame of a connection. Answered by Welcome, with two descriptors of the arena.

    The first descriptor is read-only, the second may be mapped for writing.
    """

    version: int
    client: str


class Welcome(Reply, tag=1):
    """The daemon's terms."""

    version: int
    boot_id: int
    arena_bytes: int
    max_body_bytes: int
    lent_bytes_max: int
    connection_id: Count = 0


class Ping(Request, tag=2):
    """Answered by Pong with the same payload."""

    payload: bytes = b""


class Pong(Reply, tag=2):
    """Answer to Ping."""

    payload: bytes = b""


class Declare(Request, tag=3):
    """Declare a namespace, in its canonical encoding. Answered by Declared.

    `terms` change how its blobs are remembered and brought back, by name (`Terms.as_dict`);
    what is not named stays as it was told before.
    """

    namespace: bytes
    terms: dict[str, str] = {}


class Declared(Reply, tag=3):
    """The namespace's id: 32 bytes."""

    namespace_id: bytes


class Keyed(Request):
    """Fields of every call that names a chain of keys, root side first."""

    namespace_id: bytes
    keys: bytes
    key_bytes: Count


class Match(Keyed, tag=4):
    """How many leading keys are held? Never counts as use. Answered by Matched."""

    hint: Hints = {}


class Matched(Reply, tag=4):
    """`blobs` leading blobs are held, the first `warm` of them in DRAM.

    `eta_s` estimates how long a get of all of them would take. `rebuild_blobs` more could be
    rebuilt from their text, in `rebuild_eta_s` (0: not known).
    """

    blobs: int
    warm: int
    eta_s: float
    rebuild_blobs: int = 0
    rebuild_eta_s: float = 0.0


class Get(Keyed, tag=5):
    """Lease the leading blobs. Answered by Leased.

    Waits until all are readable in DRAM or `timeout_s` passed; with `stream`,
    answers once room for all is reserved, and Wait tells when bytes are there.
    With `wait_for_writers`, blobs that a writer is filling count as held. For a runner at
    work on a `job` nothing is rebuilt.
    """

    timeout_s: float
    stream: bool = False
    wait_for_writers: bool = False
    hint: Hints = {}
    job: Count = 0


class Leased(Reply, tag=5):
    """`extents` of the leading blobs leased; why it ends there is `reason` ("" if it is all).

    `lease_id` is 0 when nothing was leased. `served` counts blobs by the tier
    that they came from.
    """

    lease_id: Count
    extents: bytes
    reason: str
    served: dict[str, int]


class Wait(Request, tag=6):
    """Wait until bytes `start` to `end` of blob number `index` of a lease are readable."""

    lease_id: Count
    index: Count
    start: Count
    end: Count
    timeout_s: float


class Waited(Reply, tag=6):
    """Readable if `reason` is empty."""

    reason: str


class Release(Request, tag=7):
    """End leases, and hand back extents whose views have died. Answered by Done.

    Ending a lease twice, or one of another client, does nothing. `extents`
    are offsets kept lent by Seal or Abort (`alive`).
    """

    lease_ids: list[Count]
    extents: list[Count] = []


class Done(Reply, tag=7):
    """Done; `count` is how many items it took effect on."""

    count: int = 0


class Reserve(Keyed, tag=8):
    """Lend extents for new blobs, all or none. Answered by Reserved.

    The first key continues `parent` (empty: it is a root). `tail_tokens` is the
    number of tokens of the last blob if it is partial, else 0. Waits up to
    `timeout_s` for room. A member of a writer group names it (`group`, `epoch`)
    and the numbers of the `parts` that it writes; others leave `parts` empty. `tokens` are
    the ids of all blobs as u32 LE, so that these can be made again; `text`, up to 1 MiB, is
    the caller's own word on this run. A runner at work on a rebuild names its `job`: then
    there are extents for what is on SSD alone, too.
    """

    parent: bytes
    tail_tokens: Count
    retention: str
    timeout_s: float
    group: str = ""
    epoch: Count = 0
    parts: list[Count] = []
    hint: Hints = {}
    tokens: bytes = b""
    text: str = ""
    job: Count = 0


class Reserved(Reply, tag=8):
    """Where to write each blob. `reasons[i]` is "" where extent i was lent.

    "exists": the key is sealed already; Seal compares digests. Any other
    reason: refused. `reservation_id` is valid until `ttl_s` passes.
    """

    reservation_id: Count
    extents: bytes
    reasons: list[str]
    ttl_s: float


class SealParts(Request, tag=9):
    """Parts `parts` of blob `index` are written: waiting readers may have them."""

    reservation_id: Count
    index: Count
    parts: list[Count]


class Seal(Request, tag=10):
    """All bytes are written: digest and publish. Answered by Sealed; ends the reservation.

    `digests[i]` is the payload digest of the bytes that the caller holds for a
    key that exists already (empty: not given). `alive` are the numbers of
    blobs of which the caller still holds writable views: they are published
    from a copy, and their extents stay lent until Release names them.
    `unwritten` are the numbers of lent extents that the caller never touched:
    what is there are others' bytes, and it is not published.
    """

    reservation_id: Count
    digests: list[bytes] = []
    alive: list[Count] = []
    unwritten: list[Count] = []


class Sealed(Reply, tag=10):
    """Per blob: stored, exists, divergent, refused, or partial (parts of others are missing)."""

    results: list[str]
    reasons: list[str]


class Abort(Request, tag=11):
    """Give up a reservation: nothing becomes visible. `alive` as in Seal. Answered by Done."""

    reservation_id: Count
    alive: list[Count] = []


class Exists(Keyed, tag=12):
    """Which keys are held (each for itself)? Answered by Held."""


class Held(Reply, tag=12):
    """One byte per key: 1 if held."""

    held: bytes


class Drop(Keyed, tag=13):
    """Free the blobs and all that continue them; those under a lease when it ends.

    With `tier` "dram" only copies in DRAM of blobs that are on SSD as well; others begin to
    be written there.
    Answered by Done.
    """

    tier: str = ""


class Pin(Keyed, tag=14):
    """Keep the blobs that are held from eviction for `ttl_s` seconds (0: no longer)."""

    ttl_s: float


class Prefetch(Keyed, tag=15):
    """Start to bring the leading blobs into DRAM. Answered by Done at once."""


class Stat(Keyed, tag=16):
    """Facts about each blob. Answered by Report with a list under "blobs"."""


class Stats(Request, tag=17):
    """Counters and gauges. Answered by Report."""


class Verify(Request, tag=18):
    """Read every blob and check its digests. Answered by Report."""

    timeout_s: float


class Holding(Request, tag=19):
    """What this client holds of all that it was granted over connections that broke.

    Leases and reservations of these connections that are not named are ended: the
    reply may have been lost, or what would have ended them. `extents` are offsets
    of which there still are writable views. Answered by Done, unless it names its own
    connection: that is then closed, and ends the same way.
    """

    connection_ids: list[Count]
    lease_ids: list[Count]
    reservation_ids: list[Count]
    extents: list[Count]


class Namespaces(Request, tag=20):
    """Facts about the `limit` namespaces whose ids come after `after`, ascending.

    Answered by Report: a list under "namespaces", and under "next" the `after` of the next
    page, empty if this is the last.
    """

    after: bytes = b""
    limit: Count = 1000


class List(Request, tag=21):
    """Facts about the `limit` blobs of a namespace whose keys come after `after`, ascending.

    Answered by Report: the namespace's own facts under "namespace", with its canonical
    encoding under "encoding"; a list under "blobs", and "next" as of Namespaces.
    """

    namespace_id: bytes
    after: bytes = b""
    limit: Count = 1000


class Explain(Keyed, tag=22):
    """Why each blob is where it is. Answered by Report with a list under "blobs"."""


class Forget(Keyed, tag=23):
    """As Drop, and erase the texts of the blobs and of all that is known to continue them.

    Answered by Done, once nothing on disk can tell them: how many blobs had bytes or a text.
    """


class ServeRebuilds(Request, tag=24):
    """A model runner is here: it makes blobs of these namespaces again, so many jobs at once.

    Answered by Done with the runner's id, which is good for as long as this connection.
    """

    namespace_ids: list[bytes]
    concurrency: Count


class NextRebuild(Request, tag=25):
    """Wait for a job of this runner's. Answered by Rebuild, or by Done after `timeout_s`."""

    runner_id: Count
    timeout_s: float


class Rebuild(Reply, tag=25):
    """Make these blobs: reserve each with `Reserve.job`, write and seal it, and say so.

    `keys` (packed, root side first) stand for `tokens` (ids as u32 LE), the last one for
    `tail_tokens` of them if that is not 0. Before them are `position` tokens, which
    `context_keys` stand for; their ids are `context`, empty if some are not known. The
    first `wanted` blobs are wanted. In `deadline_s` seconds nobody waits any longer, though
    what is made is kept; in `limit_s` the job is given to another runner.
    """

    job_id: Count
    namespace_id: bytes
    keys: bytes
    key_bytes: Count
    tail_tokens: Count
    tokens: bytes
    position: Count
    context_keys: bytes
    context: bytes
    text: str
    wanted: Count
    deadline_s: float
    limit_s: float
    priority: int


class RebuildProgress(Request, tag=26):
    """`n_sealed` leading blobs of a job are sealed. Answered by Done: how many are wanted.

    0 of a job that was given up, or to another. Sent at least every second, so that a
    runner that stands still is told from one that computes.
    """

    job_id: Count
    n_sealed: Count


class RebuildEnded(Request, tag=27):
    """A job is done, or could not be done for a `reason`. Answered by Done.

    It took `seconds` to compute the `n_sealed` leading blobs.
    """

    job_id: Count
    reason: str
    n_sealed: Count
    seconds: float


class StopRebuilds(Request, tag=28):
    """The runner takes no more jobs; those that it has not ended are given to others."""

    runner_id: Count


class Supersede(Request, tag=29):
    """The context that ends at `old_leaf` goes on as the one that ends at `new_leaf`.

    Blobs that only the old one has leave first, unless they are used. Answered by Done.
    """

    namespace_id: bytes
    old_leaf: bytes
    new_leaf: bytes


class PrefetchSession(Request, tag=30):
    """As Prefetch, of the context of a session that hints have named."""

    session: str


class Report(Reply, tag=17):
    """A tree of plain values."""

    body: dict[str, Any]


class Failed(Reply, tag=99):
    """The request raised; `code` names the class in blobstore.errors."""

    code: str
    message: str
    retry_after_s: float = 0.0


AnyRequest = (
    Hello | Ping | Declare | Match | Get | Wait | Release | Reserve | SealParts | Seal | Abort
    | Exists | Drop | Pin | Prefetch | Stat | Stats | Verify | Holding
    | Namespaces | List | Explain | Forget
    | ServeRebuilds | NextRebuild | RebuildProgress | RebuildEnded | StopRebuilds
    | Supersede | PrefetchSession
)  # fmt: skip
AnyReply = (
    Welcome | Pong | Declared | Matched | Leased | Waited | Done | Reserved | Sealed | Held
    | Rebuild | Report | Failed
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(AnyRequest).decode
_decode_reply = msgspec.msgpack.Decoder(AnyReply).decode


def decode_reply(body: bytes | memoryview) -> AnyReply:
    """The reply in `body`; raises msgspec.DecodeError if it is none."""
    try:
        return _decode_reply(body)
    except RecursionError as error:  # in the tree of a Report
        raise msgspec.DecodeError("nested too deeply") from error
