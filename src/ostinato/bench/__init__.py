"""Reproducible benchmarks: speeds are ratios within one run, and every result is checked.

=============  =================================================================================
``workloads``  what is computed: inputs, minimal work, hardware limit
``shapes``     the sizes measured on CPUs and on GPUs
``peers``      the implementations: Ostinato and its peers, a file for each of ``workloads``
``check``      correctness: results against float64
``measure``    checks each implementation, then times it
``warm``       compiles all kernels beforehand, in parallel
``sweep``      one size grown over many contestants
``papers``     the sweeps of the papers and projects behind this library, with their published figures
``calls``      host overhead of small calls and single steps
``capacity``   the largest recurrent layers that fit on a chip
``profile``    the kernels of one layer against their limits
``runs``       JSON files, with their environment
``report``     the tables of each kind of run
``grid``       a table, for the console and the documentation
``plots``      pictures
``learning``   what the layers learn
=============  =================================================================================
"""
