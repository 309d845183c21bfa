"""A parent and the child that it forks or spawns, both of them with a client.

Says what each of them found: {"child": {…}, "exit": code, "parent": {…}}.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from blobstore.clients import Client, Lease, Writer
from blobstore.errors import WrongProcess
from blobstore.units import MIB
from tests.support.blobs import chain, count_right, opaque, payload_of, put
from tests.support.program import say

NAMESPACE = opaque(MIB)
LENGTH = 3
OF_PARENT, OF_CHILD, LATER, OPEN = (chain(NAMESPACE, seed, LENGTH) for seed in range(1, 5))


def in_child(kv: Client, lease: Lease | None, writer: Writer | None, to_parent: Connection) -> None:
    """What the child can do with a client, and what it must not do with its parent's things."""
    found: dict[str, Any] = {
        "reads": count_right(kv, NAMESPACE, OF_PARENT),
        "puts": put(kv, NAMESPACE, OF_CHILD),
        "reads_own": count_right(kv, NAMESPACE, OF_CHILD),
    }
    for name, handle in (("lease", lease), ("writer", writer)):
        try:
            found[name] = handle[0].nbytes if handle is not None else "none"
        except WrongProcess:
            found[name] = "WrongProcess"
    to_parent.send_bytes(json.dumps(found).encode())


def spawned(address: str, to_parent: Connection) -> None:
    """The child of `multiprocessing` by spawn, which inherits nothing."""
    with Client(address) as kv:
        in_child(kv, None, None, to_parent)


def leave(how: str) -> None:
    """End the child, or return to the end of its program."""
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        os._exit(0)


class _Parent:
    """Holds a lease with a view, and a writer that is open and filled."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.kv = Client(address)
        put(self.kv, NAMESPACE, OF_PARENT)
        self.lease = self.kv.get(self.kv.namespace(NAMESPACE), OF_PARENT)
        self.view = self.lease[0]
        self.writer = self.kv.put(self.kv.namespace(NAMESPACE), OPEN)
        for index, key in enumerate(OPEN):
            self.writer[index][:] = payload_of(key, MIB)

    def as_child(self, how: str, to_parent: Connection) -> None:
        """Runs in the child."""
        if how == "touch":
            to_parent.send_bytes(b"{}")
            bytes(self.view)
        in_child(self.kv, self.lease, self.writer, to_parent)
        leave(how)

    def findings(self) -> dict[str, Any]:
        """What is left for the parent when the child has gone."""
        self.writer.seal()
        return {
            "view": bytes(self.view) == payload_of(OF_PARENT[0], MIB),
            "lease": bytes(self.lease[1]) == payload_of(OF_PARENT[1], MIB),
            "sealed": self.writer.results,
            "reads": count_right(self.kv, NAMESPACE, OF_PARENT),
            "reads_the_childs": count_right(self.kv, NAMESPACE, OF_CHILD),
            "puts": put(self.kv, NAMESPACE, LATER),
        }


def main(address: str, method: str, how: str) -> None:
    """The parent's life, up to its child's, and after it."""
    parent = _Parent(address)
    from_child, to_parent = multiprocessing.Pipe(duplex=False)
    if method == "os.fork":
        pid = os.fork()
        if pid == 0:
            parent.as_child(how, to_parent)
            return
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    else:
        context: Any = multiprocessing.get_context(method)
        if method == "spawn":
            child = context.Process(target=spawned, args=(address, to_parent))
        else:
            child = context.Process(target=parent.as_child, args=(how, to_parent))
        child.start()
        child.join()
        code = child.exitcode
    child_found = json.loads(from_child.recv_bytes()) if from_child.poll() else None
    say({"child": child_found, "exit": code, "parent": parent.findings()})


if __name__ == "__main__":
    main(*sys.argv[1:])
