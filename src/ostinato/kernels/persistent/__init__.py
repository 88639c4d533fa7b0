"""RNN, GRU and LSTM with their recurrent weights close to the processor for the whole sequence."""
