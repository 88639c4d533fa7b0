// What a kernel needs to know of a cell: the members of a struct Cell.  RNN, GRU and LSTM have theirs in cells/, and
// recurrence/weighted/cell.py prints that of a recurrence of the user's own.
//
// All functions compute one hidden unit of one sequence.  `before` and `after` are its states before and after a time
// step, h first.
//
// STATES       one or two
// PRODUCTS     rows of the recurrent matrix for each unit, which multiply h
// INPUTS       numbers given at each step; to the first PRODUCTS of them those products are added
// PARAMETERS   numbers that are the same at each step
// KEPT         what the backward is given of the forward beside the pre-activations; see below
// DERIVATIVES  numbers that differentiate() makes for pull()
// GRADIENTS    numbers that the backward writes for each step
// HAS_BIASES   whether the sums over steps of these are wanted, for the biases; else those of the parameters' gradients
//
// forward        The states after a step, from the inputs x, the products s and the parameters.  Leaves in x the
//                pre-activations, which differentiate() takes.
// differentiate  What of a step's derivatives does not depend on the gradients of its states, which arrive later.
// pull           The gradients of the states before a step and, in `of_arguments`, the GRADIENTS and those of the
//                parameters, from `grad`, the gradients of the states after it.
// of_product     Which of the GRADIENTS is that of a product.

enum class Kept {
    NOTHING,     // pre-activations are h, as for an RNN, whose derivative is a function of it
    CELLS,       // the second states in float32, in after[1]
    RECURRENT,   // h, and in after[1] the recurrent part of a GRU's candidate
    ALL_STATES,  // which the layer returns for each step
};
