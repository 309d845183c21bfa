"""Benchmarks, the demo and the NumPy model runner that stands for an engine.

May import everything; nothing imports it (the command line finds it by entry point).
"""
