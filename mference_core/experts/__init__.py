"""Routed experts: which slot holds which, the reads that fill them, the memory they take.

`table`, `reader` and `plan` do not import mlx; `slab` and `pool` do.
"""
