"""NIXL: memory that other hosts read, by RDMA if their network has it. The library runs in a process of its own."""
