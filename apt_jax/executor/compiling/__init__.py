"""Compilation: the sizes that programs are compiled for, their options and order, and the executables on disk."""
