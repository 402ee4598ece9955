"""Ways to start a run: its workers on this machine, torchrun, Slurm and Kubernetes."""
