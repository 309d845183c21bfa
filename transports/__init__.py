"""How bytes travel: frames on stream sockets.

Knows bytes, keys and sizes only: nothing of tiers, tokens or the service.
"""
