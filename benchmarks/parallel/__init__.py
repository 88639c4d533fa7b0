"""The parts of ``distributed.py``, which several processes run together:

=============  ==================================================================
``job.py``     this process's rank and device, and what it agrees on with the others
``errors.py``  errors relative to the results of one process
``speeds.py``  times compared with one GPU's, and memory
=============  ==================================================================
"""
