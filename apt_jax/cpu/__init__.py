"""CPU kernels in C++, compiled on the machine on which they run."""
