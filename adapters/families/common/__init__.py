"""What model families share: the form of a family, linears, MoE layers, refusals."""
