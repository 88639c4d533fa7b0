"""The choice of a scan's algorithm and tiles, by its shape and the properties of the GPU; it needs no GPU.

================  =========================================================================
``choice.py``     the choice, by the rules in the next three files
``narrow.py``     few channels, where a tile has whole rows
``streaming.py``  streaming: one block, or a cluster of two, scans all steps of its channels
``chained.py``    interleaved tiles and look-back: several blocks share the steps of a channel
``criteria.py``   what the choice depends on: the scan and the GPU
``geometry.py``   the result: the algorithm and the shape of a tile, and what follows from it
================  =========================================================================
"""
