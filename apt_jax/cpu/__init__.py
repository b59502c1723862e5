"""Kernels for CPUs in C++ (`kernels.cc`), compiled on the machine that they run on."""
