"""NIXL: memory that other hosts read, by RDMA where their network has it. The library has a process to itself."""
