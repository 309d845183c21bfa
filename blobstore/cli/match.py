"""`blobstore match`: how far a chain of keys is held."""

from __future__ import annotations

from blobstore.cli.ask import reached
from blobstore.cli.naming import KeyWords, Model, Revision, described, named
from blobstore.cli.options import ConfigFile, Json, Socket, Timeout, configured
from blobstore.cli.output import console, duration, print_json
from blobstore.protocol import Match, Matched


def match(
    words: KeyWords,
    model: Model = None,
    revision: Revision = None,
    socket: Socket = None,
    config: ConfigFile = None,
    timeout_s: Timeout = 5.0,
    as_json: Json = False,
) -> None:
    """Say how many leading keys of a chain are held, and in which tier. Never counts as use.

    Tokens are counted as those of full blobs.

    \b
    Examples:
      blobstore match 3f2a9c1b 9c0d51... 77ab02...
      blobstore match --model llama - < keys.txt
    """
    name, keys = named(words, model, revision)
    path = configured(config, socket=socket).local.socket
    with reached(path, timeout_s) as daemon:
        facts = described(daemon, name.find(daemon, keys))
        wanted = Match(bytes.fromhex(facts["id"]), keys.packed, keys.key_bytes)
        found = daemon.ask(wanted, Matched)
    tokens, cold = found.blobs * facts["tokens_per_blob"], found.blobs - found.warm
    if as_json:
        tiers = {"dram": found.warm, "ssd": cold}
        body = {"namespace": facts["id"], "keys": keys.n, "blobs": found.blobs, "tokens": tokens}
        print_json(body | {"tiers": tiers, "eta_s": found.eta_s})
        return
    out = console()
    out.print(f"{found.blobs:,} of {keys.n:,} blobs are held: {tokens:,} tokens")
    if found.blobs:
        out.print(f"{found.warm:,} in dram, {cold:,} on ssd alone")
    if found.eta_s:
        out.print(f"about {duration(found.eta_s)} to have all of them in dram")
