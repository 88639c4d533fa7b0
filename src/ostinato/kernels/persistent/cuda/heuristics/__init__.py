"""How a layer is divided among thread blocks, and how long that takes: by sizes alone, without a GPU.

==================  ========================================================================
``cells.py``        the sizes of a cell's arrays
``geometry.py``     the launch geometry: a division of the layer
``fitting.py``      which of its weights fit into registers, shared memory and L2
``costs.py``        the estimated time of a step
``search.py``       the fastest geometry that fits
``cudnn.py``        the precision of cuDNN, and for which layers its results are wrong
``cudnn_costs.py``  the estimated time of a layer in cuDNN
==================  ========================================================================
"""
