"""A faithful test double of CUDA-graph semantics on the CPU."""
