"""What an inference server imports: the clients, and the words of their calls.

    from blobstore.clients import Client, KVLayout, Namespace

Knows identity, protocol and errors, never the daemon.
"""

from __future__ import annotations

from blobstore.clients.aio import AsyncClient, AsyncLease, AsyncWriter
from blobstore.clients.bound import BoundNamespace
from blobstore.clients.client_session import AsyncClientSession, ClientSession
from blobstore.clients.hit import Hit
from blobstore.clients.rebuild_job import AsyncRebuildJob, RebuildJob, RebuildStopped
from blobstore.clients.rebuilds import AsyncRebuildServer, RebuildServer
from blobstore.clients.sync import Client, Lease, Writer
from blobstore.hint import Hint
from blobstore.keys import Keys
from blobstore.layout import KVLayout, LayerGroup, Shard
from blobstore.namespace import Namespace, WriterGroup
from blobstore.terms import Terms

__all__ = [
    "AsyncClient",
    "AsyncClientSession",
    "AsyncLease",
    "AsyncRebuildJob",
    "AsyncRebuildServer",
    "AsyncWriter",
    "BoundNamespace",
    "Client",
    "ClientSession",
    "Hint",
    "Hit",
    "KVLayout",
    "Keys",
    "LayerGroup",
    "Lease",
    "Namespace",
    "RebuildJob",
    "RebuildServer",
    "RebuildStopped",
    "Shard",
    "Terms",
    "Writer",
    "WriterGroup",
]
