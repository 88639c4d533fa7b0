"""Which algorithm and tiles a scan has: by its shape and the properties of a GPU, without one.

================  ==============================================================
``choice.py``     the choice, by the rules of the next three
``narrow.py``     few channels, of which a tile has whole rows
``streaming.py``  a block, or a cluster of two, walks along its channels' steps
``chained.py``    several blocks share the steps of a channel
``criteria.py``   what the choice depends on
``geometry.py``   what follows from it
================  ==============================================================
"""
