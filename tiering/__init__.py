"""Where bytes live: arenas, segments, the catalogue on disk, eviction order.

Knows bytes, keys and sizes only: no tokens, no sockets, nothing of the service.
"""
