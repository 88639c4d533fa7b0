"""How a layer is divided among blocks of threads, and how long that takes: by sizes alone, without a GPU.

==================  ============================================================
``geometry.py``     a division
``fitting.py``      which of its weights registers and shared memory have room for
``costs.py``        the estimated time of a step
``search.py``       the fastest geometry that fits
``cudnn.py``        how exactly cuDNN computes, and what wrongly
``cudnn_costs.py``  the estimated time of a layer there
==================  ============================================================
"""
