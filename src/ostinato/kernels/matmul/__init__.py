"""Matrix products:

==================  ===================================================================================
``gemm.py``         the products over all time steps, by the fastest of torch's implementations; on a
                    GPU their operands are transposed by ``transpose.cu`` first where that pays off
``convolution.py``  products on AMD CPUs, as convolutions
``cublas.py``       products on a GPU in another precision than PyTorch is set to
``grouped.py``      several small products in one launch on a GPU, by ``grouped.cu``
``precision.py``    whether float32 may be rounded to tf32, and autocast's dtype
==================  ===================================================================================
"""
