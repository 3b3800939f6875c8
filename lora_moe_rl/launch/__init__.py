"""What starts a run on a cluster: files for Slurm, KubeRay and plain ssh, made from its config."""
