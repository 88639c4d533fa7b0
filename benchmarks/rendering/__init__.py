"""The runs of ``results/`` as Markdown, a function a kind of table; ``tables.py`` names each table and its run.

==============  ======================================================================
``runs``        the files, and a table with the note of where its figures come from
``headlines``   the few rows of README.md
``speeds``      contestants beside each other: times, errors, memory
``kernels``     where the time of a kernel goes, and what each optimisation is worth
``papers``      sweeps beside what was published, and every published claim
``learning``    what the layers learned
``gpus``        several GPUs, measured and simulated
``examples``    what the programs of ``examples/`` return
``plots``       the pictures that no command draws
==============  ======================================================================
"""
