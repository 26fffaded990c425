module twinlens-example

go 1.19
