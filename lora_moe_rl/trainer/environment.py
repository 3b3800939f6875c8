"""Environment variables of a process that trains on the CPU, to be set before torch is imported."""

# Threads that wait must not spin: ranks and engines take turns on the same cores. mcore compiles
# small functions at their first call, for seconds, with nothing to gain.
CPU_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TORCHDYNAMO_DISABLE": "1"}
