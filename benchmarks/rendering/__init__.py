"""Renders the runs of ``results/`` as Markdown, a function for each kind of table; ``tables.py`` says which is which.

==============  ======================================================================
``runs``        the files, and tables with a note of where their figures come from
``headlines``   the short tables of README.md
``speeds``      contestants compared: times, errors, memory
``kernels``     where the time of a kernel goes, and what each optimisation is worth
``papers``      sweeps beside published figures, and every published claim
``learning``    what the layers learned
``gpus``        several GPUs, measured and simulated
``examples``    what the programs of ``examples/`` return
``plots``       the plots that no command draws
==============  ======================================================================
"""
