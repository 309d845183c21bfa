"""The door's OpenAPI description: what is served, with which bounds, and every status.

Written by hand and held true by a test that asks for everything in it at random. Each
operation's id also names it in metrics.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from blobstore import __version__
from blobstore.fields import MAX_TEXT_BYTES
from blobstore.http.answers import answer
from blobstore.http.rebuilders import TTL_S_MAX, URL_CHARS_MAX
from blobstore.keys import KEY_BYTES_MAX, KEY_BYTES_MIN
from blobstore.layout import MAX_PAYLOAD_BYTES
from blobstore.namespace import MAX_TOKENS_PER_BLOB
from blobstore.protocol import KEYS_MAX, TOKENS_MAX
from blobstore.runners import CONCURRENCY_MAX
from blobstore.terms import DIVERGENCE, RECALL, TEXT

Tree = dict[str, Any]

JSON = "application/json"
BYTES = "application/octet-stream"

ERRORS: Mapping[int, str] = {
    400: "The request is wrong: repeating it cannot help.",
    401: "No token, or none that is good.",
    403: "The token lacks the right.",
    404: "The namespace is not declared (or hidden from the token), or the blob not to be had.",
    409: "Other bytes are held under the key, or the parent is not held.",
    412: "A precondition failed.",
    413: "The body is too large; it was not read.",
    415: "A body of another type, or encoded.",
    416: "The range lies beyond the blob.",
    421: "The Host header is not served here.",
    503: "Too busy, or stopping: try again after Retry-After.",
    504: "It took too long.",
    507: "There is no room.",
    500: "Something failed inside; the daemon's log says what.",
}
_ALWAYS = (400, 421, 500, 503)


def describe() -> Tree:
    """The whole description."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "blobstore",
            "version": __version__,
            "description": "KV caches as immutable blobs: put, find and get them.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"token": []}],
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": _SCHEMAS,
            "responses": {f"E{status}": _error(status) for status in ERRORS},
        },
        "paths": _PATHS,
    }


def routes() -> list[web.RouteDef]:
    """Where it is served."""

    async def openapi(_: web.Request) -> web.StreamResponse:
        return answer(document)

    document = describe()
    return [web.get("/openapi.json", openapi)]


def _object(required: Tree, optional: Tree | None = None, *, closed: bool = False) -> Tree:
    found: Tree = {
        "type": "object",
        "properties": required | (optional or {}),
        "required": list(required),
    }
    return found | ({"additionalProperties": False} if closed else {})


def _list(items: Tree, **bounds: int) -> Tree:
    return {"type": "array", "items": items} | bounds


def _ref(name: str) -> Tree:
    return {"$ref": f"#/components/schemas/{name}"}


def _error(status: int) -> Tree:
    headers: Tree = {}
    if status == 401:
        headers = {"WWW-Authenticate": {"schema": {"const": "Bearer"}, "required": True}}
    if status == 503:
        headers = {"Retry-After": {"schema": {"type": "string"}, "required": True}}
    if status == 416:
        headers = {"Content-Range": {"schema": {"type": "string"}, "required": True}}
    return {
        "description": ERRORS[status],
        "headers": headers,
        "content": {JSON: {"schema": _ref("Error")}},
    }


def _answers(good: Mapping[int, Tree], *errors: int) -> Tree:
    every = sorted({*errors, *_ALWAYS})
    return {str(status): good[status] for status in good} | {
        str(status): {"$ref": f"#/components/responses/E{status}"} for status in every
    }


def _json(description: str, schema: Tree) -> Tree:
    return {"description": description, "content": {JSON: {"schema": schema}}}


def _body(**contents: Tree) -> Tree:
    types = {"json": JSON, "octets": BYTES}
    return {
        "required": True,
        "content": {types[name]: {"schema": schema} for name, schema in contents.items()},
    }


def _query(name: str, description: str, schema: Tree) -> Tree:
    return {"name": name, "in": "query", "description": description, "schema": schema}


def _header(name: str, description: str) -> Tree:
    return {"name": name, "in": "header", "description": description, "schema": {"type": "string"}}


def _operation(
    name: str,
    summary: str,
    answers: Tree,
    *,
    parameters: list[Tree] | None = None,
    body: Tree | None = None,
    is_open: bool = False,
) -> Tree:
    found: Tree = {"operationId": name, "summary": summary, "responses": answers}
    if parameters:
        found["parameters"] = parameters
    if body:
        found["requestBody"] = body
    if is_open:
        found["security"] = []
    return found


_COUNT: Tree = {"type": "integer", "minimum": 0}
_NUMBER: Tree = {"type": "number"}
_TEXT: Tree = {"type": "string"}
_HEX: Tree = {
    "type": "string",
    "pattern": f"^([0-9a-f]{{2}}){{{KEY_BYTES_MIN},{KEY_BYTES_MAX}}}$",
    "description": f"{KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes in lower-case hex",
}
_HEX_OR_NONE: Tree = {
    "type": "string",
    "pattern": f"^(([0-9a-f]{{2}}){{{KEY_BYTES_MIN},{KEY_BYTES_MAX}}})?$",
}
_KEYS: Tree = _list(_ref("Key"), minItems=1, maxItems=KEYS_MAX) | {
    "description": "Root side first, all of one length."
}
_HINT_TEXT: Tree = {"type": "string", "maxLength": 256}
_HINT: Tree = _object(
    {},
    {
        "session": _HINT_TEXT,
        "turn": {"type": ["integer", "null"], "minimum": 0, "maximum": (1 << 63) - 1},
        "kind": _HINT_TEXT,
        "finish": _HINT_TEXT,
    },
) | {"description": "What the call is for; never changes what it returns."}
_TIMEOUT: Tree = {"type": "number", "minimum": 0, "maximum": 3600}

_TERMS: Tree = {
    "text": {"enum": list(TEXT), "description": "What is kept of the tokens of blobs."},
    "recall": {"enum": list(RECALL), "description": "How blobs come back that left DRAM."},
    "divergence": {
        "enum": list(DIVERGENCE),
        "description": "What becomes of rebuilt blobs that differ.",
    },
}

_SCHEMAS: Tree = {
    "Key": _HEX,
    "Error": _object(
        {"error": _TEXT, "message": _TEXT, "retry_after_s": _NUMBER},
        {"reason": _TEXT, "result": {"const": "divergent"}},
    ),
    "Namespace": _object(
        {
            "model": {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_BYTES},
            "opaque_bytes": {"type": "integer", "minimum": 0, "maximum": MAX_PAYLOAD_BYTES},
        },
        {
            "revision": {"type": "string", "maxLength": MAX_TEXT_BYTES},
            "salt": {"type": "string", "maxLength": MAX_TEXT_BYTES},
            "tokens_per_blob": {"type": "integer", "minimum": 1, "maximum": MAX_TOKENS_PER_BLOB},
            "hash_scheme": {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_BYTES},
            "terms": _object({}, _TERMS, closed=True),
        },
        closed=True,
    ),
    "Facts": {
        "type": "object",
        "description": "Of one blob; empty if nothing is known of it.",
        "properties": {
            "key": _TEXT,
            "parent": _TEXT,
            "depth": _COUNT,
            "tokens": _COUNT,
            "nbytes": _COUNT,
            "digest": _TEXT,
            "retention": {"enum": ["volatile", "standard", "durable"]},
            "tiers": _list({"enum": ["dram", "ssd"]}),
            "pins": _COUNT,
            "dirty": {"type": "boolean"},
            "idle_s": _NUMBER,
        },
    },
    "Count": _object({"count": _COUNT}),
}

_NS: Tree = {
    "name": "namespace",
    "in": "path",
    "required": True,
    "description": "The id that declaring it gave.",
    "schema": _HEX,
}
_KEY: Tree = {"name": "key", "in": "path", "required": True, "schema": _HEX}
_COUNTED = _json("How many blobs it took effect on.", _ref("Count"))

_BLOB_HEADERS: Tree = {
    "ETag": {"schema": _TEXT, "required": True, "description": "The digest of the blob."},
    "X-Blobstore-Tier": {"schema": {"enum": ["dram", "ssd", "writer", "rebuild"]}},
    "X-Blobstore-Tokens": {"schema": _TEXT},
}


def _blob(description: str) -> Tree:
    octets: Tree = {"schema": {"type": "string", "format": "binary"}}
    return {"description": description, "headers": _BLOB_HEADERS, "content": {BYTES: octets}}


def _batch(name: str, summary: str, good: Tree, extra: Tree | None = None, **needed: Tree) -> Tree:
    """A call that names a chain of keys."""
    asked = _object({"keys": _KEYS, **needed}, extra, closed=True)
    errors = (400, 401, 403, 404, 413, 415)
    return {
        "parameters": [_NS],
        "post": _operation(name, summary, _answers({200: good}, *errors), body=_body(json=asked)),
    }


_UNCHANGED: Tree = {
    "description": "It is what the caller has.",
    "headers": {"ETag": {"schema": _TEXT, "required": True}},
}
_CONDITIONS = [
    _header("If-None-Match", "304 if the blob has one of these tags."),
    _header("If-Match", "412 if it has none of them."),
]
_HINTS = [
    _header("X-Blobstore-Session", "Conversation or run that it is for, percent-encoded."),
    _header("X-Blobstore-Turn", "Its number in the session.")
    | {"schema": {"type": "string", "pattern": "^[0-9]{1,18}$"}},
    _header("X-Blobstore-Kind", 'Of request, such as "subagent", percent-encoded.'),
    _header("X-Blobstore-Finish", 'Why the model stopped, such as "tool_use".'),
]
_WAIT = _query("timeout_s", "How long to wait for room and for the disk.", _TIMEOUT)

_GET = _operation(
    "get",
    "The bytes of a blob.",
    _answers(
        {200: _blob("All of it."), 206: _blob("The range."), 304: _UNCHANGED},
        *(400, 401, 403, 404, 412, 416),
    ),
    parameters=[
        _WAIT,
        _header("Range", "One range of bytes; anything else is ignored."),
        _header("If-Range", "Ignore the range unless the blob has this tag."),
        *_CONDITIONS,
        *_HINTS,
    ],
)
_HEAD = _operation(
    "head",
    "The headers of a get. Nothing is read.",
    {
        status: {k: v for k, v in found.items() if k != "content"}
        for status, found in {
            "200": _blob("It is held."),
            "304": _UNCHANGED,
            **{str(s): {"description": ERRORS[s]} for s in (400, 401, 403, 404, 412, *_ALWAYS)},
        }.items()
    },
    parameters=[_WAIT, *_CONDITIONS],
)
_PUT = _operation(
    "put",
    "Store a blob. Nothing is visible before all of it is there and right.",
    _answers(
        {
            201: _json("Stored.", _object({"result": {"const": "stored"}})),
            200: _json("The same bytes were held.", _object({"result": {"const": "exists"}})),
            409: _json(
                "Other bytes are held, or the parent is not.",
                _ref("Error"),
            ),
        },
        *(400, 401, 403, 404, 412, 413, 415, 504, 507),
    ),
    parameters=[
        _query("parent", "Key of the blob that this one continues, if any.", _HEX_OR_NONE),
        _query("retention", "", {"enum": ["volatile", "standard", "durable"]}),
        _query("tokens", "Of a partial last blob.", {"type": "integer", "minimum": 1}),
        _query("timeout_s", "How long to wait for room.", _TIMEOUT),
        _query("job", "Of a runner that rebuilds it.", {"type": "integer", "minimum": 0}),
        _header("Repr-Digest", "sha-256=:BASE64: is checked before anything is stored."),
        _header("If-None-Match", "*: 412 if the key is held."),
        _header("If-Match", "412 unless the blob that is held has one of these tags."),
        *_HINTS,
    ],
    body=_body(octets={"type": "string", "format": "binary"}),
)

_DECLARED = _object({"id": _HEX, "blob_bytes": _COUNT, "tokens_per_blob": _COUNT})
_LISTED = _object(
    {"id": _HEX, "model": _TEXT, "revision": _TEXT, "blobs": _COUNT, "blob_bytes": _COUNT}
)
_ONE = "/v1/namespaces/{namespace}"

_PATHS: Tree = {
    "/v1/namespaces": {
        "get": _operation(
            "namespaces",
            "The namespaces that the token may see.",
            _answers({200: _json("All of them.", _object({"namespaces": _list(_LISTED)}))}, 401),
        ),
        "post": _operation(
            "declare",
            "Declare a namespace; again is harmless.",
            _answers({200: _json("It is declared.", _DECLARED)}, 400, 401, 403, 413, 415),
            parameters=[
                _query(name, schema["description"], {"enum": schema["enum"]})
                for name, schema in _TERMS.items()
            ],
            body=_body(
                json=_ref("Namespace"),
                octets={"type": "string", "format": "binary", "description": "Canonical bytes."},
            ),
        ),
    },
    f"{_ONE}/blobs": {
        "parameters": [_NS],
        "get": _operation(
            "list",
            "A page of blobs, by key.",
            _answers(
                {
                    200: _json(
                        "Ask for what comes after `next` until that is null.",
                        _object(
                            {"blobs": _list(_ref("Facts")), "next": {"type": ["string", "null"]}}
                        ),
                    )
                },
                *(400, 401, 403, 404),
            ),
            parameters=[
                _query("limit", "", {"type": "integer", "minimum": 1, "maximum": 1000}),
                _query("after", "The key before the page; empty for the first.", _HEX_OR_NONE),
            ],
        ),
    },
    f"{_ONE}/blobs/{{key}}": {
        "parameters": [_NS, _KEY],
        "get": _GET,
        "head": _HEAD,
        "put": _PUT,
        "delete": _operation(
            "delete",
            "Free the blob and all that continue it.",
            _answers({200: _COUNTED}, 400, 401, 403, 404),
        ),
    },
    f"{_ONE}/match": _batch(
        "match",
        "How many leading keys are held.",
        _json(
            "The tier of each of them; `eta_s` is how long a get of all would take. So many "
            "further ones could be rebuilt, in that time (0: not known yet).",
            _object(
                {
                    "blobs": _COUNT,
                    "tokens": _COUNT,
                    "tiers": _list(_TEXT),
                    "eta_s": _NUMBER,
                    "rebuild_blobs": _COUNT,
                    "rebuild_eta_s": _NUMBER,
                }
            ),
        ),
        {
            "tail_tokens": _COUNT | {"description": "Of a partial last blob, else 0."},
            "hint": _HINT,
        },
    ),
    f"{_ONE}/exists": _batch(
        "exists",
        "Which keys are held, each for itself.",
        _json("One for each key.", _object({"held": _list({"type": "boolean"})})),
    ),
    f"{_ONE}/stat": _batch(
        "stat",
        "Facts about each blob.",
        _json("One for each key.", _object({"blobs": _list(_ref("Facts"))})),
    ),
    f"{_ONE}/explain": _batch(
        "explain",
        "Why each blob is where it is.",
        _json("One for each key.", _object({"blobs": _list({"type": "object"})})),
        keys=_list(_ref("Key"), minItems=1, maxItems=100),
    ),
    f"{_ONE}/prefetch": _batch("prefetch", "Start to bring blobs into DRAM.", _COUNTED),
    f"{_ONE}/supersede": {
        "parameters": [_NS],
        "post": _operation(
            "supersede",
            "Let what only one context has leave first: it goes on as another.",
            _answers({200: _COUNTED}, 400, 401, 403, 404, 413, 415),
            body=_body(
                json=_object({"old_leaf": _ref("Key"), "new_leaf": _ref("Key")}, closed=True)
            ),
        ),
    },
    "/v1/prefetch": {
        "post": _operation(
            "prefetch_session",
            "Start to bring the context of a session into DRAM.",
            _answers({200: _COUNTED}, 400, 401, 403, 413, 415),
            body=_body(json=_object({"session": _HINT_TEXT | {"minLength": 1}}, closed=True)),
        )
    },
    f"{_ONE}/pin": _batch(
        "pin",
        "Keep blobs from eviction; 0 seconds end it.",
        _COUNTED,
        ttl_s={"type": "number", "minimum": 0, "maximum": 2592000},
    ),
    f"{_ONE}/drop": _batch(
        "drop",
        "Free blobs and all that continue them.",
        _COUNTED,
        {"tier": {"enum": ["", "dram"], "description": "dram: copies in DRAM alone."}},
    ),
    f"{_ONE}/texts": _batch(
        "texts",
        "Keep the tokens of blobs that were put: those of all keys, one after the other.",
        _COUNTED,
        {"text": {"type": "string", "description": "The caller's, of 1 MiB at most."}},
        token_ids=_list(
            {"type": "integer", "minimum": 0, "maximum": (1 << 32) - 1},
            minItems=1,
            maxItems=TOKENS_MAX,
        ),
    ),
    f"{_ONE}/forget": _batch(
        "forget", "Free blobs and all that continue them, and erase their tokens.", _COUNTED
    ),
    f"{_ONE}/rebuilders": {
        "parameters": [_NS],
        "post": _operation(
            "rebuilders",
            "Have blobs that are to be rebuilt posted to a URL, for so long; 0 seconds end it.",
            _answers(
                {200: _json("It is registered.", _object({"runner": _COUNT, "ttl_s": _NUMBER}))},
                400,
                401,
                403,
                404,
                413,
                415,
                503,
            ),
            body=_body(
                json=_object(
                    {"url": {"type": "string", "maxLength": URL_CHARS_MAX}},
                    {
                        "concurrency": {
                            "type": "integer",
                            "minimum": 1,
                            "maximum": CONCURRENCY_MAX,
                        },
                        "ttl_s": {"type": "number", "minimum": 0, "maximum": TTL_S_MAX},
                        "blob_bytes": {"type": ["integer", "null"]},
                    },
                    closed=True,
                )
            ),
        ),
    },
    "/v1/stats": {
        "get": _operation(
            "stats",
            "Counters and gauges.",
            _answers({200: _json("A tree.", {"type": "object"})}, 401),
        )
    },
    "/v1/verify": {
        "post": _operation(
            "verify",
            "Read every blob back and check its digests.",
            _answers({200: _json("A report.", {"type": "object"})}, 400, 401, 403, 413, 415),
            body=_body(json=_object({}, {"timeout_s": _TIMEOUT}, closed=True))
            | {"required": False},
        )
    },
    "/healthz": {
        "get": _operation(
            "healthz",
            "The daemon answers.",
            _answers({200: _json("It does.", _object({"status": {"const": "ok"}}))}, 400),
            is_open=True,
        )
    },
    "/readyz": {
        "get": _operation(
            "readyz",
            "The daemon takes requests; 503 once it is stopping.",
            _answers({200: _json("It does.", _object({"status": {"const": "ready"}}))}, 400),
            is_open=True,
        )
    },
}

VERBS: Mapping[tuple[str, str], str] = {
    (method.upper(), path): operation["operationId"]
    for path, methods in _PATHS.items()
    for method, operation in methods.items()
    if method != "parameters"
}
"""The name of the operation that a method on a path is."""

QUERIES: Mapping[str, frozenset[str]] = {
    operation["operationId"]: frozenset(
        parameter["name"]
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "query"
    )
    for methods in _PATHS.values()
    for method, operation in methods.items()
    if method != "parameters"
}
"""What an operation takes in the query."""
