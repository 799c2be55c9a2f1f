"""What a processor and its memory are asked for directly: kernels in C beside torch's operators, and how much fits."""
