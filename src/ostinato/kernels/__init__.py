"""The kernels by family, `scan` and `persistent`, and what every family uses."""
