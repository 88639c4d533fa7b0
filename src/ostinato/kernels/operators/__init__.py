"""Makes functions of tensors into operators that PyTorch differentiates, batches, compiles and exports.

================  =================================================================================
``autograd.py``   gradients of a function by calling it again in the backward pass
``dispatch.py``   a differentiable operator
``several.py``    several calls of an operator as one
``eager.py``      which calls may bypass the registered operator, and functions prepared for them
``vmap.py``       how ``torch.vmap`` batches calls of an operator
``export.py``     exported programs that run without this library
``captured.py``   the tensors that a function captures instead of taking them as arguments
================  =================================================================================
"""
