"""Benchmarks that anyone can repeat: every speed a ratio taken in one run, its correctness beside it.

==============  ================================================================
``workloads``   what is computed: shapes, inputs, bytes or FLOPs, reference
``peers``       who computes it: Ostinato and every other implementation
``measure``     checks each contestant against the reference, then times it
``persistent``  the same for RNN, GRU and LSTM without gradient
``report``      the machine, tables and JSON files
==============  ================================================================
"""
