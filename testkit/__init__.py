"""What tests, benchmarks and tools share: checkpoints made on the spot, plain references, cases of kernels, services
without a model and the server that forks services. It imports no test and no benchmark."""
