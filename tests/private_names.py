"""Attribute names that classes derived from layers may use, so that our classes must not rely on them."""

_WORDS = """
    arguments at_once buffer cache call cell check_shapes computes copied device dropout fast fits frozen gates hidden
    inputs is_frozen is_list_of kernel kernels keep_pruned layer layers listed lengths mask masks mode other outputs
    parameter path plan recorded reset reset_state run scan shapes single_steps size sizes stack stack_of state
    state_size state_sizes states step steps suffixes time total unmasked_weights weight weights zero_state
"""
PRIVATE_NAMES = [f"_{word}" for word in _WORDS.split()]
