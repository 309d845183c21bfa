"""An immutable, content-addressed store for the KV caches of LLM inference servers."""

__version__ = "0.1.0"
