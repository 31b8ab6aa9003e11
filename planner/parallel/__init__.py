"""What DDP, FSDP, DTensor and pipelines hold on a device: observed, not run."""
