"""CPU kernels in C++, compiled on the machine that they run on."""
