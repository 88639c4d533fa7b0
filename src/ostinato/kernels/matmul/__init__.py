"""Products of matrices:

==================  ===================================================================================
``gemm.py``         those over all steps, by the fastest of torch's implementations; on GPUs after a
                    transposition by ``transpose.cu`` where that pays off
``convolution.py``  those on AMD's CPUs
``cublas.py``       those of another precision than PyTorch's
``grouped.py``      several small ones in one launch on a GPU, by ``grouped.cu``
``precision.py``    whether float32 may be rounded to tf32, and what autocast computes in
==================  ===================================================================================
"""
