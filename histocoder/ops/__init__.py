"""Kernels in C that replace torch's operators on CPUs."""
