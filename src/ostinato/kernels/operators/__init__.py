"""How functions of tensors become operators that PyTorch differentiates, batches, compiles and exports:

===================  =================================================================================
``autograd.py``      gradients of a function that is called again
``dispatch.py``      a differentiable operator
``several.py``       several calls of one, at the same time
``eager.py``         which calls may bypass its registration, and functions prepared for them
``vmap.py``          how ``torch.vmap`` batches its calls
``export.py``        programs that run without this library
``surroundings.py``  the tensors that a function takes from around it
===================  =================================================================================
"""
