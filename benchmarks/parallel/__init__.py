"""The parts of ``distributed.py``, which several processes run together:

=============  ==================================================================
``job.py``     this process among the others: its device, barriers, medians
``errors.py``  results beside one process's
``speeds.py``  times beside one GPU's, and memory
=============  ==================================================================
"""
