import os

if os.environ.get("HOST_CUDA"):
    from host_cuda import begin

    begin.begin()
