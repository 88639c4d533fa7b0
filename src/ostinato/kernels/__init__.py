"""The kernels by family, `scan`, `recurrence` and `persistent`, and what every family uses."""
