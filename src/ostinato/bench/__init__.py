"""Benchmarks that anyone can repeat: every speed a ratio taken in one run, its correctness beside it.

=============  ================================================================
``workloads``  what is computed: inputs, least work, limit
``shapes``     in which sizes, on a CPU and on a GPU
``peers``      who computes it: Ostinato and every other implementation
``check``      what each result is held against: float64
``measure``    checks each contestant, then times it
``warm``       compiles beforehand, in many processes, what they would compile
``sweeps``     workloads that differ in one size: the source documents' tables
``calls``      what small calls and single steps cost the host
``capacity``   the largest recurrent layers that fit on a chip
``profile``    the kernels of one layer, and how near their limits they come
``runs``       JSON files, and the machine they are of
``report``     tables, for the console and the documentation
``plots``      pictures
``learning``   what the layers learn
=============  ================================================================
"""
