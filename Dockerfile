# The project and its engines, with the versions that requirements/ pins:
#
#     docker build -t lora-moe-rl:cpu .
#     docker build -t lora-moe-rl:gpu --build-arg GPU=1 .
#
# The CUDA libraries come with the Python packages; the driver comes from the host.
FROM python:3.12-slim
ARG GPU=

# g++: Triton and torch compile small launchers at run time. libnuma1: vLLM's CPU build links it.
RUN apt-get update && apt-get install --yes --no-install-recommends make g++ libnuma1 \
    && rm -r /var/lib/apt/lists/*
RUN useradd --create-home trainer && install --directory --owner=trainer /opt/lora_moe_rl

USER trainer
WORKDIR /opt/lora_moe_rl
COPY --chown=trainer . .
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
RUN make setup GPU=$GPU
ENV PATH=/opt/lora_moe_rl/.venv/bin:$PATH
CMD ["lora-moe-rl", "doctor"]
