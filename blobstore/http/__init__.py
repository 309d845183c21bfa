"""The HTTP door: the store's verbs for people, tools, remote clients and other languages."""
