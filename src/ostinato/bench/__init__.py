"""Reproducible benchmarks: speeds are stated as ratios within one run, and every result is checked before it is timed.

=============  =================================================================================
``workloads``  what is computed: inputs, float64 reference, minimal work, hardware limit
``shapes``     the sizes measured on CPUs and on GPUs
``peers``      the implementations: Ostinato and its peers, one file for each kind of workload
``check``      correctness: errors relative to the float64 reference
``measure``    checks each implementation, then times it
``warm``       compiles all kernels beforehand, in parallel processes
``sweep``      many contestants measured over one growing size
``papers``     the sweeps of the papers and projects behind this library, beside their published figures
``calls``      host overhead of small calls and single steps
``capacity``   the largest recurrent layers that fit on a chip
``profile``    the kernels of one layer, as fractions of the hardware's limits
``runs``       JSON files of results, with the environment they were measured in
``report``     the tables of each kind of run
``grid``       a table, printed to the console or written as Markdown
``plots``      the plots of sweeps and training runs
``learning``   what the layers learn
=============  =================================================================================
"""
