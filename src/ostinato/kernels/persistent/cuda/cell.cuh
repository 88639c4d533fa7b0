// The interface of a cell: the members of a struct Cell.  Those of RNN, GRU and LSTM are in cells/, and
// recurrence/weighted/cell.py prints that of a recurrence of the user's own.
//
// All functions compute one hidden unit of one sequence.  `before` and `after` are its states before and after a time
// step, h first.
//
// STATES       the number of states
// PRODUCTS     rows of the recurrent matrix for each unit, whose products with h are `s`
// INPUTS       numbers given at each step, one for each product first
// PARAMETERS   numbers that are the same at each step
// KEPT         what the forward pass saves for the backward pass, beside the pre-activations; see below
// DERIVATIVES  numbers that differentiate() computes for pull()
// GRADIENTS    gradients that the backward pass writes for each step
// HAS_BIASES   whether these are summed over steps, for the biases; else the gradients of the parameters are
//
// forward        Computes the states after a step from the inputs x, the products s and the parameters.  Leaves in x
//                the pre-activations, which differentiate() takes.
// differentiate  Computes the derivatives of a step that do not depend on the gradients of its states, which arrive
//                later.
// pull           From `grad`, the gradients of the states after a step, computes those of the states before it and, in
//                `of_arguments`, the GRADIENTS, followed by the gradients of the parameters.
// of_product     The index among the GRADIENTS of a product's gradient.

enum class Kept {
    NOTHING,     // `pre` is h, as for an RNN, whose derivative is a function of it
    CELLS,       // the second state in float32, which is after[1]
    RECURRENT,   // h and, as after[1], the recurrent part of a GRU's candidate
    ALL_STATES,  // all states, which the layer returns for each step
};
