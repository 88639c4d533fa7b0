"""Persistent kernels of RNN, GRU and LSTM: recurrent weights stay on chip, or in cache, for the whole sequence."""
