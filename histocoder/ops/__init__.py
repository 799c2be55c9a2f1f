"""Kernels in C that replace torch's operators on CPUs, and the memory of the machine."""
